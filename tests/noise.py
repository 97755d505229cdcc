"Weights after updates by AdamW, compared across processors."
import torch


def noisy(grads):
    """Which entries of a parameter had, in some update, a gradient that is rounding noise: under 3e-5 of what the parameter's are.

    AdamW moves an entry by about the rate however small its gradient is, so there each processor goes its own way
    (always for the bias of the keys, which softmax cancels).
    """
    grads = torch.stack(grads)
    return (grads.abs() < 3e-5*grads.pow(2).mean().sqrt()).any(0)


def assert_near(name, got, want, grads, lr):
    "Entries whose gradient is never noise differ by at most 3 % of a step, all by at most a step. `grads`: a tensor for each update."
    off, noise = (got-want).abs(), noisy(grads)
    assert noise.float().mean() <= (.4 if 'qkv_proj.bias' in name or 'k_proj.bias' in name else .01), f'{name}: {noise.float().mean():.2%} of the gradients are noise'
    assert off.max() <= lr, name
    if not noise.all(): assert off[~noise].max() <= .03*lr, name
