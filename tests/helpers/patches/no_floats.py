"""With --dtype bf16, FSDP rounds each float that the model gets, such as a number of tokens."""

import torch
from helpers.patches import in_place_of


def check_floats(model, args, kwargs):
    floats = [name for name, x in kwargs.items() if torch.is_tensor(x) and x.is_floating_point()]
    assert not floats, f"FSDP would round {floats}"


@in_place_of(torch.nn.Module, "to_empty")
def to_empty_and_check(to_empty_alone, self, **options):
    self.register_forward_pre_hook(check_floats, with_kwargs=True)
    return to_empty_alone(self, **options)
