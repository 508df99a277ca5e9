"""What the server process of `runner` imports once for all runs."""

import comet_ml  # noqa: F401
import datasets  # noqa: F401
import torch  # noqa: F401
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401
from transformers.models.llama import modeling_llama  # noqa: F401
