"""The environment of the tests, before anything imports the libraries, which read it once.

Caches of our own, no account, and the CPU alone, where fp32 losses can be compared and one machine
has any number of devices.
"""

import os
import tempfile

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"  # several tests run at a time; more threads than cores spin
os.environ["GOMP_SPINCOUNT"] = "10000"  # as in the chapters; their own line comes too late here
_CACHE = tempfile.TemporaryDirectory(prefix="distributed-training-demo-")
os.environ["HF_HOME"] = _CACHE.name
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"  # nobody listens: tests need no network
os.environ["HF_UPDATE_DOWNLOAD_COUNTS"] = "false"  # so no file of the disk makes a client
os.environ["COMET_AUTO_LOG_DISABLE"] = "true"  # only some tests wait a second for its archive
os.environ["COMET_AUTO_LOG_ENV_DETAILS"] = "false"  # a list of all packages, in seconds
os.environ["COMET_CONFIG"] = os.path.join(_CACHE.name, "comet.config")
for name in ("COMET_API_KEY", "HF_TOKEN", "HF_HUB_OFFLINE"):
    os.environ.pop(name, None)
for name in [name for name in os.environ if name.startswith("WANDB_")]:
    del os.environ[name]
