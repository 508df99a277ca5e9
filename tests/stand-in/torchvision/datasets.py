class VisionDataset:
    pass
