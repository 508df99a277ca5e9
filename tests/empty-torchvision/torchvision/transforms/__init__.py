from enum import Enum

# Transformers builds a table of these where it finds torchvision
names = ["NEAREST_EXACT", "BOX", "BILINEAR", "HAMMING", "BICUBIC", "LANCZOS"]
InterpolationMode = Enum("InterpolationMode", names)
