"""The ops, one declaration each, one file a family.

Importing this package imports every family, so that the registry is complete: a new op touches one file.
"""

import importlib
import pkgutil

for _module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_module}")
