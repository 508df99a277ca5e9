"""Stands in for torchvision, which mosaicml-streaming imports for datasets of images.

The tests have it on their path where torchvision is not installed: pip may have a build for CUDA
only, and this build cannot be imported beside a torch for CPUs. Nothing here is ever called.
"""

io = None
