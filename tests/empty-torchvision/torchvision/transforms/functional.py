def to_tensor(image):
    raise NotImplementedError


pil_to_tensor = to_tensor
