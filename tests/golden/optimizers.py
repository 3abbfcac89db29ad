"""Ten steps of optimizers: of PyTorch, of Optax, and written out."""

import math

import numpy as np
import torch

from formulas import flat


def lion(start, gradient, steps, lr, decay, beta1=0.9, beta2=0.99):
    """Algorithm 2 of Chen et al., arXiv 2302.06675, in NumPy."""
    theta, m = start.copy(), np.zeros_like(start)
    for t in range(1, steps + 1):
        g = gradient(theta, t)
        c = beta1 * m + (1 - beta1) * g
        theta = theta - lr * (np.sign(c) + decay * theta)
        m = beta2 * m + (1 - beta2) * g
    return theta


def optax_lion(start, gradient, steps, lr, decay, beta1=0.9, beta2=0.99):
    """Optax's Lion, in float32."""
    import jax.numpy as jnp
    import optax

    optimizer = optax.lion(lr, b1=beta1, b2=beta2, weight_decay=decay)
    theta = jnp.asarray(start, jnp.float32)
    state = optimizer.init(theta)
    for t in range(1, steps + 1):
        g = jnp.asarray(gradient(np.asarray(theta, np.float64), t), jnp.float32)
        updates, state = optimizer.update(g, state, theta)
        theta = optax.apply_updates(theta, updates)
    return np.asarray(theta, np.float64)


def make_optimizers(with_optax, steps=10, shape=(6, 4), lr=0.02, decay=0.1, ema_decay=0.9):
    """Ten steps of one matrix by several rules, in float64, but Muon's in float32: it iterates in bfloat16 inside.

    The gradient of step t (from 1) is w - sin(0.7 i + 0.3 t + 0.05 i * i) for element i of the weights w before it.
    SGD and Muon are PyTorch's; the moving average is torch.optim.swa_utils.AveragedModel's. Lion is
    written out and, in float32, Optax's, which is null without Optax.
    """
    number = np.arange(math.prod(shape), dtype=np.float64)
    index = torch.from_numpy(number)
    start = (0.3 * torch.sin(0.7 * index + 0.05 * index * index)).reshape(shape)
    target = lambda t: torch.sin(0.7 * index + 0.3 * t + 0.05 * index * index).reshape(shape)

    def train(dtype, make, average=False):
        weights = torch.nn.Parameter(start.to(dtype, copy=True))
        optimizer = make([weights])
        model = torch.nn.ParameterList([weights])
        averaged = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(ema_decay)
        )
        for t in range(1, steps + 1):
            weights.grad = weights.detach() - target(t).to(dtype)
            optimizer.step()
            averaged.update_parameters(model)
        return flat((averaged.module[0] if average else weights).detach().double())

    def by_numpy(rule):
        waves = lambda t: np.sin(0.7 * number + 0.3 * t + 0.05 * number * number).reshape(shape)
        gradient = lambda weights, t: weights - waves(t)
        return rule(start.numpy(), gradient, steps, lr, decay).reshape(-1).tolist()

    sgd = lambda nesterov: lambda params: torch.optim.SGD(
        params, lr=lr, momentum=0.9, weight_decay=decay, nesterov=nesterov
    )
    muon = lambda params: torch.optim.Muon(params, lr=lr, weight_decay=decay, momentum=0.95, nesterov=True)
    return {
        "steps": steps,
        "shape": list(shape),
        "lr": lr,
        "weight_decay": decay,
        "ema_decay": ema_decay,
        "start": flat(start),
        "sgd": train(torch.float64, sgd(False)),
        "nesterov": train(torch.float64, sgd(True)),
        "ema": train(torch.float64, sgd(True), average=True),
        "lion": by_numpy(lion),
        "lion_optax": by_numpy(optax_lion) if with_optax else None,
        "muon": train(torch.float32, muon),
    }
