"""The CUDA engine: device profiles, and what runs each op on a card, known without one."""
