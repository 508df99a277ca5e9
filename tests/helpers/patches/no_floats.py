"""With --dtype bf16, FSDP rounds each float that the model gets, such as a number of tokens."""

import torch


def check_floats(model, args, kwargs):
    floats = [name for name, x in kwargs.items() if torch.is_tensor(x) and x.is_floating_point()]
    assert not floats, f"FSDP would round {floats}"


def to_empty_and_check(self, **options):
    self.register_forward_pre_hook(check_floats, with_kwargs=True)
    return to_empty_alone(self, **options)


to_empty_alone = torch.nn.Module.to_empty
torch.nn.Module.to_empty = to_empty_and_check
