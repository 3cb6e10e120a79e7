"""What PyTorch 2.13 takes for whole models: figures that the count is held beside."""

from __future__ import annotations

# MiB of live tensors at the peak of a step, by the zoo's name; float32, Nesterov momentum, as measured on a CPU.
MEASURED = {
    "conv_chain": 2569,
    "resnet50:batch=32": 2849,
    "resnet101:batch=20": 2785,
    "gpt2_small:batch=4,seq=1024": 5636,
    "bert_base:batch=8,seq=512": 4633,
    "unet:batch=4,size=256": 1676,
    "vit_b16:batch=32": 4334,
    "mobilenet_v2:batch=32": 2434,
}
