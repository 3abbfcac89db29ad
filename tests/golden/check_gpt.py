"""Compares the formulas of gpt.py with the layers of PyTorch, the models of transformers, and finite differences."""

import torch

from formulas import IGNORE, affine, make_tokens, make_weights, mean_loss
from gpt import feed_forward, forward, normalise, tensor_shapes


def check_against_library(config):
    """The formulas above are the library's layers and the loss its cross_entropy."""
    functional = torch.nn.functional
    weights = make_weights(tensor_shapes(config))
    x = weights["wte.weight"][torch.arange(config["vocab_size"])][None]
    width, epsilon = config["hidden_size"], config["norm_epsilon"]
    if config["kind"] == "gpt2":
        want = functional.layer_norm(x, (width,), weights["norm_f.weight"], weights["norm_f.bias"], epsilon)
        gelu = functional.gelu(affine(weights, "blocks.0.mlp.fc", x), approximate="tanh")
        mlp = affine(weights, "blocks.0.mlp.proj", gelu)
    else:
        want = functional.rms_norm(x, (width,), weights["norm_f.weight"], epsilon)
        gate, up = affine(weights, "blocks.0.mlp.gate_up", x).chunk(2, -1)
        mlp = affine(weights, "blocks.0.mlp.proj", functional.silu(gate) * up)
    torch.testing.assert_close(normalise(config, weights, "norm_f", x), want, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(feed_forward(config, weights, "blocks.0.mlp", x), mlp, rtol=1e-13, atol=1e-13)
    tokens, targets = make_tokens(config)
    targets[4] = IGNORE
    logits = forward(config, weights, tokens)
    want = functional.cross_entropy(
        logits.reshape(-1, config["vocab_size"]), torch.tensor(targets), ignore_index=IGNORE, label_smoothing=0.1
    )
    torch.testing.assert_close(mean_loss(logits, targets, 0.1), want, rtol=1e-13, atol=1e-13)


def check_against_transformers(config):
    """The whole models are the library's GPT-2 and Llama: same logits from the same weights."""
    import transformers

    weights = {name: w.detach() for name, w in make_weights(tensor_shapes(config)).items()}
    heads, groups, dim = config["num_attention_heads"], config["num_query_groups"], config["head_dim"]
    common = dict(
        vocab_size=config["vocab_size"],
        tie_word_embeddings=config["tied"],
        attn_implementation="eager",
        bos_token_id=0,
        eos_token_id=0,
    )
    state = {}
    if config["kind"] == "gpt2":
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_positions=config["seq_length"],
                n_embd=config["hidden_size"],
                n_layer=config["num_layers"],
                n_head=heads,
                n_inner=config["ffn_hidden_size"],
                layer_norm_epsilon=config["norm_epsilon"],
                **common,
            )
        )
        renamed = [
            ("norm_1", "ln_1"),
            ("norm_2", "ln_2"),
            ("attn.qkv", "attn.c_attn"),
            ("attn.proj", "attn.c_proj"),
            ("mlp.fc", "mlp.c_fc"),
            ("mlp.proj", "mlp.c_proj"),
            ("norm_f", "ln_f"),
            ("blocks.", "h."),
        ]
        for name, w in weights.items():
            inside = name.startswith("blocks.") and w.dim() == 2
            for ours, theirs in renamed:
                name = name.replace(ours, theirs)
            state[f"transformer.{name}"] = w.T if inside else w  # their Conv1D is (in, out)
        state["lm_head.weight"] = weights["wte.weight"]
    else:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=config["hidden_size"],
                intermediate_size=config["ffn_hidden_size"],
                num_hidden_layers=config["num_layers"],
                num_attention_heads=heads,
                num_key_value_heads=groups,
                head_dim=dim,
                max_position_embeddings=config["seq_length"],
                rms_norm_eps=config["norm_epsilon"],
                rope_parameters=dict(rope_type="default", rope_theta=config["rotary_base"]),
                **common,
            )
        )
        state["model.embed_tokens.weight"] = weights["wte.weight"]
        state["model.norm.weight"] = weights["norm_f.weight"]
        state["lm_head.weight"] = weights["lm_head.weight"]
        for i in range(config["num_layers"]):
            ours, theirs = f"blocks.{i}", f"model.layers.{i}"
            q, k, v = weights[f"{ours}.attn.qkv.weight"].split([heads * dim, groups * dim, groups * dim])
            gate, up = weights[f"{ours}.mlp.gate_up.weight"].chunk(2)
            state[f"{theirs}.self_attn.q_proj.weight"] = q
            state[f"{theirs}.self_attn.k_proj.weight"] = k
            state[f"{theirs}.self_attn.v_proj.weight"] = v
            state[f"{theirs}.self_attn.o_proj.weight"] = weights[f"{ours}.attn.proj.weight"]
            state[f"{theirs}.mlp.gate_proj.weight"] = gate
            state[f"{theirs}.mlp.up_proj.weight"] = up
            state[f"{theirs}.mlp.down_proj.weight"] = weights[f"{ours}.mlp.proj.weight"]
            state[f"{theirs}.input_layernorm.weight"] = weights[f"{ours}.norm_1.weight"]
            state[f"{theirs}.post_attention_layernorm.weight"] = weights[f"{ours}.norm_2.weight"]
    model = model.double().eval()
    model.load_state_dict(state)
    tokens, _ = make_tokens(config)
    index = torch.tensor(tokens).reshape(config["batch_size"], config["seq_length"])
    with torch.no_grad():
        gap = (model(index).logits - forward(config, weights, tokens)).abs().max().item()
    # Theirs keeps the rotary angles in f32 whatever the dtype of the model.
    bound = 1e-12 if config["kind"] == "gpt2" else 1e-6
    assert gap < bound, f"{config['kind']}: logits differ from transformers' by {gap}"
    print(f"{config['kind']}: logits within {gap:.1e} of transformers'")


def check_gradients(config):
    """Central differences on one element of every tensor agree with the recorded gradients."""
    weights = make_weights(tensor_shapes(config))
    tokens, targets = make_tokens(config)
    mean_loss(forward(config, weights, tokens), targets, 0.1).backward()
    step = 1e-5
    for k, (name, w) in enumerate(weights.items()):
        at = (5 * k + 3) % w.numel()
        line, sides = w.detach().view(-1), []
        centre = line[at].item()
        for sign in (1, -1):
            line[at] = centre + sign * step
            sides.append(mean_loss(forward(config, weights, tokens), targets, 0.1).item())
        line[at] = centre
        numeric, analytic = (sides[0] - sides[1]) / (2 * step), w.grad.view(-1)[at].item()
        close = abs(numeric - analytic) < 1e-7 * max(1.0, abs(analytic))
        assert close, f"{name}[{at}]: {analytic} but numerically {numeric}"
