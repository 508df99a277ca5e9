"""Runs of chapter 9."""

import yaml
from helpers.runner import CHAPTER_9, Job, Run
from helpers.trainer import Folder


class Runs:
    """Runs of chapter 9 with a small model, by a configuration of their own, `small.yaml`."""

    def __init__(self, folder, model, dataset):
        self.folder, self.dataset, self.number = folder, dataset, 0
        (folder / "conf").mkdir()
        small = {
            "defaults": ["train", "_self_"],
            "model": {"name": str(model), "from_scratch": True},
            "data": {"path": "json", "data_files": str(dataset), "seq_length": 32},
            "optimizer": {"learning_rate": 1e-2},
            "training": {"per_device_train_batch_size": 4, "logging_steps": 1, "save_steps": 100},
            "experiment_name": "run",
            "save_dir": str(folder),
            "report_to": [],
        }
        (folder / "conf" / "small.yaml").write_text(yaml.safe_dump(small))
        self.arguments = ["--config-dir", folder / "conf", "--config-name", "small"]

    def start(self, *overrides, processes=0, **options):
        self.number += 1
        output = self.folder / f"output-{self.number}.txt"
        if processes:
            return Job(CHAPTER_9, [*self.arguments, *overrides], output, processes, **options)
        return Run(CHAPTER_9, [*self.arguments, *overrides], output, **options)

    def __call__(self, *overrides, name="run", status=0, **options) -> Folder:
        run = self.start(*overrides, f"experiment_name={name}", **options)
        assert run.wait() == status, run.output
        return Folder(self.find(name), run.output)

    def find(self, name: str):
        """The folder of a run is named after its overrides."""
        (file,) = self.folder.glob(f"{name}/**/metrics.jsonl")
        return file.parent
