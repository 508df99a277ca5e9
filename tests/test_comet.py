"""Comet may refuse, be unreachable or fail later: training goes on, and an archive has it all."""

import http.server
import json
import os
import sys
import threading
import zipfile

import pytest
from helpers.runner import CHAPTER_1, python

pytestmark = pytest.mark.rest


class Comet(http.server.BaseHTTPRequestHandler):
    """Comet's side, as far as a run needs it to begin."""

    def answer(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, body = self.respond()
        body = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer

    def begins(self) -> bool:
        return any(part in self.path for part in ("add/run", "isAlive", "3d-limits"))

    def respond(self):
        experiment = {"runId": "r", "project_id": "p", "focusUrl": "http://comet/"}
        return 200, experiment | {"version": "3.5.0", "msg": "3.5.0"}

    def log_message(self, *_):
        pass


class WrongKey(Comet):
    def respond(self):
        return 401, {"msg": "Invalid API key", "sdk_error_code": 90212}


class FullDisk(Comet):
    """Takes the experiment, and then has no room for any of its data."""

    def respond(self):
        return super().respond() if self.begins() else (507, {"msg": "Insufficient storage"})


NO_COMET = "warning: Comet cannot be reached, so it writes a file"
CASES = {  # the server, and what the run says
    "wrong key": (WrongKey, f"{NO_COMET} (CometRestApiException"),
    "full disk": (FullDisk, "Could not send live data to Comet"),
    "refused": (None, f"{NO_COMET} (ConnectionError"),
}


def test_comet_does_not_hold_up_training(trainer):
    """All of them at the same time."""
    runs = {}
    for case, (server, _) in CASES.items():
        address = "http://127.0.0.1:9"  # nobody listens
        if server:
            listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), server)
            threading.Thread(target=listener.serve_forever, daemon=True).start()
            address = f"http://127.0.0.1:{listener.server_port}"
        env = {"COMET_API_KEY": "k" * 25, "COMET_URL_OVERRIDE": address + "/clientlib/"}
        env["COMET_GET_OR_ADD_EXPERIMENT_RETRY_TOTAL"] = "1"  # the fork has read it before
        runs[case] = trainer.start("--max-steps", 6, name=case, comet=True, env=env)
    for case, (_, message) in CASES.items():
        run = runs[case]
        assert run.wait(100) == 0
        assert message in run.output
        assert "Traceback" not in run.output
        # The records that could not be sent are in an archive, to be uploaded later.
        (archive,) = (trainer.folder / case / "comet").glob("*.zip")
        messages = zipfile.ZipFile(archive).read("messages.json").decode()
        assert messages.count('"metricName":"loss"') >= 6
    # The archive and the folder of the run have the same parameters.
    parameters = json.loads((trainer.folder / case / "parameters.json").read_text())
    assert parameters["parameters_total"] > 0
    found = map(json.loads, messages.splitlines())
    found = [m["payload"]["param"] for m in found if m["type"] == "parameter_msg"]
    found = {p["paramName"]: str(p["paramValue"]) for p in found}  # and words of the command
    assert found.items() >= {name: str(value) for name, value in parameters.items()}.items()


FACTS = """global_batch world_size parameters_total parameters_trainable dataset_samples
tokens_hash device_name device_memory_gb torch_version cuda_version
transformers_version"""


def test_the_archive_of_a_fresh_process(trainer, chapter_1, monkeypatch):
    """Comet reads its variables when it is imported, so no fork can show this."""
    flags = [*trainer.defaults("run"), "--max-steps", 3, "--eval-freq", 2]
    monkeypatch.setattr(sys, "argv", ["train-llm.py"])
    understood = chapter_1.parse_args()
    environment = {name: x for name, x in os.environ.items() if not name.startswith("COMET_")}
    done = python(CHAPTER_1, *flags, env=environment)
    folder = trainer.folder / "run"
    (archive,) = (folder / "comet").glob("*.zip")
    assert f"comet upload {archive}" in done.stdout + done.stderr
    messages = zipfile.ZipFile(archive).read("messages.json").decode().splitlines()
    payloads = [json.loads(line)["payload"] for line in messages]
    parameters = {p.get("param", p.get("params", {})).get("paramName") for p in payloads}
    assert parameters >= {*vars(understood), *FACTS.split()}
    assert parameters >= json.loads((folder / "parameters.json").read_text()).keys()
    logged = {
        (m["metricName"], m["step"]): m["metricValue"] for p in payloads if (m := p.get("metric"))
    }
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    expected = {
        (name, record["step"]): value
        for record in records
        for name, value in record.items()
        if name not in ("step", "epoch")
    }
    comets = ("sys.", "process duration")
    own = {key: float(x) for key, x in logged.items() if not key[0].startswith(comets)}
    assert own == pytest.approx(expected)  # nothing is logged twice, or by Comet itself
    assert any("LlamaForCausalLM" in str(p.get("graph")) for p in payloads)
