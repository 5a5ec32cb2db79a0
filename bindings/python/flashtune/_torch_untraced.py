"""Calls that torch.compile leaves as they are, with a break of the graph around each.

Such a call hands addresses to the library. Traced code frees a tensor after its last use. For a
copy or a stack that use is the reading of its address, before the launch. Only traced code imports
this module, which loads torch's compiler.
"""

import torch


@torch.compiler.disable
def untraced(function, *arguments):
    """function(*arguments), hidden from torch.compile."""
    return function(*arguments)
