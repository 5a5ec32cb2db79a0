"""Names the GPU and the library versions behind a result, for a bench's first line and its JSON."""

import sys

import torch


def describe():
    """{name: version} of the GPU, PyTorch and cuDNN. Exits the program where PyTorch sees no
    CUDA device."""
    if not torch.cuda.is_available():
        sys.exit(f"{sys.argv[0]} needs a CUDA device that PyTorch sees")
    machine = dict(gpu=torch.cuda.get_device_name(), torch=torch.__version__, cudnn=torch.backends.cudnn.version())
    print(f"{machine['gpu']}, torch {machine['torch']}, cuDNN {machine['cudnn']}, bf16")
    return machine
