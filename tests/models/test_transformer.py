# SPDX-License-Identifier: Apache-2.0
import dataclasses
import doctest
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from models import config as config_module
from models import mlp, transformer
from models.transformer import PRESETS, TransformerConfig

ROWS, TOKENS, VOCAB = 8, 12, 48
GPT = TransformerConfig(VOCAB, TOKENS, 2, 4, 4, 16, 32, loss_chunk=5, remat="none")
LLAMA = dataclasses.replace(
    GPT, num_kv_heads=2, norm="rmsnorm", positions="rope", mlp="swiglu", bias=False, tied=False
)
BOTH = pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])


loss_fn = jax.jit(transformer.loss_fn, static_argnums=0)


def abstract_params(config):
    return jax.eval_shape(functools.partial(transformer.init_params, config), jax.random.key(0))


@functools.cache
def make_params(config):
    """Livelier than `init_params` makes them, biases and norm scales too; nothing to compile."""
    rng = np.random.default_rng(0)
    draw = lambda leaf: jnp.asarray(rng.normal(0.0, 0.3, leaf.shape), leaf.dtype)
    return jax.tree.map(draw, abstract_params(config))


def make_batch(rows=ROWS, tokens=TOKENS):
    key, mask_key = jax.random.split(jax.random.key(1))
    return {
        "tokens": jax.random.randint(key, (rows, tokens + 1), 0, VOCAB),
        "mask": jax.random.uniform(mask_key, (rows, tokens)),
    }


def assert_close(a, b, rtol=2e-5, atol=2e-5):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol), a, b)


@functools.partial(jax.jit, static_argnames=("config", "loss_fn"))
def value_and_grad(config, params, batch, loss_fn=transformer.loss_fn):
    def loss(params):
        return loss_fn(config, params, batch, None)

    return jax.value_and_grad(loss, has_aux=True)(params)


def plain_loss_fn(config, params, batch, key):
    """Whole logits and optax's cross-entropy."""
    logits_BTV = transformer.logits(config, params, batch["tokens"][:, :-1])
    losses_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, batch["tokens"][:, 1:])
    return jnp.sum(losses_BT * batch["mask"]), jnp.sum(batch["mask"])


def equations(jaxpr, times=1):
    """Walk a jaxpr and those inside it; yields each equation and how often a scan repeats it."""
    for eqn in jaxpr.eqns:
        yield eqn, times
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner, times * eqn.params.get("length", 1))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("tiny", 842_496),
        ("gpt2-124m", 124_439_808),
        ("gpt2-1.5b", 1_557_611_200),
        ("gpt-7.5b", 7_467_786_240),
        ("llama2-7b", 6_738_415_616),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
    ],
)
def test_presets_have_the_published_parameter_counts(name, count):
    assert transformer.num_params(PRESETS[name]) == count
    assert len(PRESETS) == 7


def test_the_7_5b_preset_is_within_a_percent_of_its_name():
    assert abs(transformer.num_params(PRESETS["gpt-7.5b"]) / 7.5e9 - 1) < 0.01


def test_every_tiny_leaf_splits_in_eight():
    for leaf in jax.tree.leaves(abstract_params(PRESETS["tiny"])):
        assert leaf.shape[-1] % 8 == 0


def test_params_are_a_pure_fp32_dict_with_stacked_layers():
    params = transformer.init_params(GPT, jax.random.key(0))
    assert params["blocks"]["attn"]["q"]["kernel"].shape == (2, 16, 16)
    assert params["blocks"]["mlp"]["up"]["kernel"].shape == (2, 16, 32)
    for leaf in jax.tree.leaves(params["blocks"]):
        assert leaf.shape[0] == GPT.num_layers
    for path, leaf in jax.tree.leaves_with_path(params):
        assert isinstance(leaf, jax.Array), path
        assert leaf.dtype == jnp.float32
        assert all(isinstance(entry, jax.tree_util.DictKey) for entry in path)
    attn = params["blocks"]["attn"]
    assert not np.array_equal(attn["q"]["kernel"][0], attn["q"]["kernel"][1])
    # Projections into the residual stream start smaller by sqrt(2 L).
    assert jnp.std(attn["q"]["kernel"]) == pytest.approx(0.02, rel=0.15)
    assert jnp.std(attn["o"]["kernel"]) == pytest.approx(0.02 / math.sqrt(4), rel=0.15)


@pytest.mark.parametrize(("config", "chunk"), [(GPT, 4), (GPT, 5), (GPT, 99), (LLAMA, 5)])
def test_chunked_loss_is_plain_cross_entropy(config, chunk):
    params, batch = make_params(config), make_batch()
    plain = value_and_grad(config, params, batch, plain_loss_fn)
    chunked = value_and_grad(dataclasses.replace(config, loss_chunk=chunk), params, batch)
    assert_close(chunked, plain)


def test_the_comparison_with_plain_cross_entropy_can_fail():
    params, batch = make_params(GPT), make_batch()
    wrong = dict(batch, mask=jnp.roll(batch["mask"], 1, axis=1))
    right, wrong = (value_and_grad(GPT, params, b, plain_loss_fn) for b in (batch, wrong))
    with pytest.raises(AssertionError):
        assert_close(right, wrong)


def biggest_array(config, rows=2):
    """Elements of the biggest array in the compiled loss and gradient."""
    params = abstract_params(config)
    tokens = jax.ShapeDtypeStruct((rows, config.seq_len + 1), jnp.int32)
    grad = jax.grad(lambda params, batch: transformer.loss_fn(config, params, batch)[0])
    text = jax.jit(grad).lower(params, {"tokens": tokens}).compile().as_text()
    shapes = [part.split("]")[0] for part in text.split("f32[")[1:]]
    return max(math.prod(int(size) for size in shape.split(",") if size) for shape in shapes)


def test_whole_logits_are_never_in_memory(monkeypatch):
    config = dataclasses.replace(GPT, vocab_size=1000, seq_len=32, loss_chunk=8)
    whole = 2 * 32 * 1000
    assert biggest_array(config) < whole
    # The same count sees them when there is one chunk, and when the backward keeps every chunk's.
    assert biggest_array(dataclasses.replace(config, loss_chunk=32)) >= whole
    monkeypatch.setattr(jax, "checkpoint", lambda fun, **options: fun)
    assert biggest_array(config) >= whole


@BOTH
def test_a_later_token_does_not_change_earlier_losses(config, monkeypatch):
    params, batch, changed = make_params(config), make_batch(), 7
    tokens = batch["tokens"]
    other = tokens.at[:, changed].set((tokens[:, changed] + 1) % VOCAB)

    def loss(tokens, mask_T, run=loss_fn):
        mask = jnp.broadcast_to(mask_T, (ROWS, TOKENS))
        return run(config, params, {"tokens": tokens, "mask": mask})[0]

    earlier = (jnp.arange(TOKENS) < changed - 1).astype(jnp.float32)
    assert loss(tokens, earlier) == loss(other, earlier)
    assert loss(tokens, 1 - earlier) != loss(other, 1 - earlier)

    attention = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda *args, is_causal, **rest: attention(*args, **rest)
    )
    sabotaged = jax.jit(lambda *args: transformer.loss_fn(*args), static_argnums=0)
    assert loss(tokens, earlier, sabotaged) != loss(other, earlier, sabotaged)


def test_grouped_queries_are_full_attention_with_repeated_heads():
    config = dataclasses.replace(GPT, num_kv_heads=2)
    params, batch = make_params(config), make_batch()
    full = dataclasses.replace(config, num_kv_heads=4)
    grouped_loss, _ = loss_fn(config, params, batch)

    def loss_with(repeat):
        def widen(leaf):
            heads = leaf.reshape(*leaf.shape[:-1], 2, 4)
            return repeat(heads).reshape(*leaf.shape[:-1], 16)

        attn = dict(params["blocks"]["attn"])
        attn["k"], attn["v"] = (jax.tree.map(widen, attn[name]) for name in "kv")
        wide = dict(params, blocks=dict(params["blocks"], attn=attn))
        return loss_fn(full, wide, batch)[0]

    assert_close(loss_with(lambda heads: jnp.repeat(heads, 2, axis=-2)), grouped_loss)
    tiled = loss_with(lambda heads: jnp.concatenate([heads, heads], axis=-2))
    assert abs(tiled - grouped_loss) > 1e-3


def test_rope_scores_depend_on_distance_only():
    config = dataclasses.replace(LLAMA, d_model=32)
    q_E, k_E = jax.random.normal(jax.random.key(2), (2, config.head_dim))
    rows = [jnp.broadcast_to(x_E, (1, 20, 1, config.head_dim)) for x_E in (q_E, k_E)]
    table = transformer.rope_table(config, 20)
    q_TE, k_TE = (transformer.apply_rope(x, table)[0, :, 0] for x in rows)
    scores = q_TE @ k_TE.T
    for distance in (-3, 0, 5):
        diagonal = jnp.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)
    assert jnp.std(scores[0]) > 0.1
    assert_close(scores[4, 4], q_E @ k_E)
    assert_close(jnp.linalg.norm(q_TE, axis=-1), jnp.full(20, jnp.linalg.norm(q_E)))


def test_a_tied_head_is_the_embedding():
    tied = dataclasses.replace(LLAMA, tied=True)
    params, batch = make_params(LLAMA), make_batch()
    same = dict(params, head=params["embed"])
    bare = {name: leaf for name, leaf in params.items() if name != "head"}
    assert jax.tree.structure(bare) == jax.tree.structure(make_params(tied))
    tied_loss = loss_fn(tied, bare, batch)[0]
    assert_close(loss_fn(LLAMA, same, batch)[0], tied_loss)
    assert abs(loss_fn(LLAMA, params, batch)[0] - tied_loss) > 1e-3
    assert transformer.num_params(LLAMA) - transformer.num_params(tied) == VOCAB * 16


@pytest.mark.parametrize("config", [GPT])
def test_dropout_follows_its_key_and_is_off_in_eval(config):
    params, batch = make_params(config), make_batch()
    dropped = dataclasses.replace(config, dropout=0.5)
    one, two = jax.random.split(jax.random.key(3))
    loss = functools.partial(loss_fn, dropped, params, batch)
    evaluate = jax.jit(functools.partial(transformer.eval_loss_fn, dropped, params, batch))
    without = loss_fn(config, params, batch)[0]
    assert loss(one)[0] == loss(one)[0]
    assert abs(loss(one)[0] - loss(two)[0]) > 1e-3
    assert abs(loss(one)[0] - without) > 1e-3
    assert evaluate(one)[0] == evaluate(two)[0]
    assert loss(None)[0] == without
    np.testing.assert_allclose(evaluate(one)[0], without, rtol=1e-6)  # compiled, and not
    assert loss_fn(config, params, batch, one)[0] == without


def test_dropout_draws_once_for_the_embedding_and_twice_in_each_layer():
    dropped = dataclasses.replace(GPT, dropout=0.5)
    loss = functools.partial(transformer.loss_fn, dropped)
    jaxpr = jax.make_jaxpr(loss)(make_params(GPT), make_batch(), jax.random.key(0))
    masks = [
        times
        for eqn, times in equations(jaxpr.jaxpr)
        if eqn.primitive.name == "random_bits" and eqn.params["shape"] == (ROWS, TOKENS, 16)
    ]
    assert sum(masks) == 1 + 2 * GPT.num_layers


@BOTH
def test_remat_changes_the_program_and_not_the_gradient(config):
    config = dataclasses.replace(config, dropout=0.1 if config is GPT else 0.0)
    params, batch = make_params(config), make_batch()
    results, remats = [], []
    for remat in ("none", "full"):
        loss = functools.partial(transformer.loss_fn, dataclasses.replace(config, remat=remat))
        grad = jax.value_and_grad(
            lambda params, loss=loss: loss(params, batch, jax.random.key(4))[0]
        )
        jaxpr = jax.make_jaxpr(grad)(params)
        results.append(jax.jit(grad)(params))
        names = [str(eqn.primitive) for eqn, _ in equations(jaxpr.jaxpr)]
        remats.append(sum("remat" in name or "checkpoint" in name for name in names))
    assert_close(*results)
    assert remats[1] > remats[0]


def test_masked_tokens_do_not_count():
    params, batch = make_params(GPT), make_batch()
    mask = jnp.ones((ROWS, TOKENS)).at[:, 8:].set(0)
    padded = batch["tokens"].at[:, 9:].set(0)
    loss = functools.partial(loss_fn, GPT, params)
    loss_sum, weight = loss({"tokens": batch["tokens"], "mask": mask})
    assert weight == ROWS * 8
    assert loss({"tokens": padded, "mask": mask})[0] == loss_sum
    assert loss({"tokens": padded})[0] != loss({"tokens": batch["tokens"]})[0]
    assert_close(loss({"tokens": batch["tokens"][:, :9]}), (loss_sum, weight))
    assert loss({"tokens": padded})[1] == ROWS * TOKENS
    assert_close(loss({"tokens": padded, "mask": mask.astype(bool)})[0], loss_sum)


def fp32_matmuls(config, dtype):
    """Matmuls of the loss and its gradient that would run in fp32."""
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), make_params(config))
    batch = make_batch()
    grad = jax.value_and_grad(lambda params: transformer.loss_fn(config, params, batch)[0])
    dots = [
        eqn
        for eqn, _ in equations(jax.make_jaxpr(grad)(params).jaxpr)
        if eqn.primitive.name == "dot_general"
    ]
    assert len(dots) > 20
    slow = []
    for eqn in dots:
        dtypes = [operand.aval.dtype for operand in eqn.invars]
        named = eqn.params["precision"] == jax.lax.DotAlgorithmPreset.BF16_BF16_F32
        if not named and dtypes != [jnp.bfloat16] * 2:
            slow.append(eqn)
    return slow


@BOTH
def test_bf16_params_give_bf16_matmuls_and_an_fp32_loss(config, monkeypatch):
    assert fp32_matmuls(config, jnp.bfloat16) == []
    assert fp32_matmuls(config, jnp.float32)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), make_params(config))
    loss_sum, weight = loss_fn(config, params, make_batch())
    assert loss_sum.dtype == weight.dtype == jnp.float32
    exact, _ = loss_fn(config, make_params(config), make_batch())
    np.testing.assert_allclose(loss_sum, exact, rtol=0.02)
    tokens = make_batch()["tokens"][:, :-1]
    logits = jax.eval_shape(functools.partial(transformer.logits, config), params, tokens)
    assert (logits.shape, logits.dtype) == ((ROWS, TOKENS, VOCAB), jnp.float32)


def test_a_head_without_a_named_algorithm_would_be_seen(monkeypatch):
    def head_logits(x, head):
        return jnp.einsum("bcd,vd->bcv", x, head, preferred_element_type=jnp.float32)

    monkeypatch.setattr(transformer, "head_logits", head_logits)
    assert len(fp32_matmuls(GPT, jnp.bfloat16)) == 2


@pytest.mark.parametrize(
    ("config", "remat", "vary"),
    [(GPT, "full", True), (LLAMA, "none", True), (GPT, "full", False)],
)
def test_shard_map_sums_to_the_single_call(config, remat, vary):
    remat_config = dataclasses.replace(config, remat=remat)
    mesh = Mesh(np.array(jax.devices()[:ROWS]), ("data",))
    params, batch = make_params(config), make_batch()

    def sharded(params, tokens):
        if vary:
            params = jax.tree.map(lambda a: jax.lax.pcast(a, "data", to="varying"), params)
        loss, grads = value_and_grad(remat_config, params, {"tokens": tokens})
        # JAX itself sums the gradient of what is replicated.
        return jax.lax.psum(loss, "data"), jax.lax.psum(grads, "data") if vary else grads

    specs = {"mesh": mesh, "in_specs": (P(), P("data")), "out_specs": P(), "check_vma": True}
    summed = jax.jit(jax.shard_map(sharded, **specs))(params, batch["tokens"])
    batch["mask"] = jnp.ones_like(batch["mask"])
    assert_close(summed, value_and_grad(config, params, batch), rtol=1e-4, atol=1e-4)


@BOTH
def test_vmap_over_a_named_axis_sums_to_the_single_call(config):
    dropped = dataclasses.replace(config, dropout=0.1, remat="full")
    params, batch = make_params(config), make_batch()
    split = jax.tree.map(lambda a: a.reshape(4, ROWS // 4, *a.shape[1:]), batch)

    def mapped(config, params, batch, key=None):
        if key is not None:
            return jax.lax.psum(transformer.loss_fn(config, params, batch, key), "data")
        return jax.lax.psum(value_and_grad(config, params, batch), "data")

    def over_data(config, *axes):
        axes = {"in_axes": axes, "out_axes": None, "axis_name": "data", "spmd_axis_name": "data"}
        return jax.vmap(functools.partial(mapped, config), **axes)

    summed = jax.jit(over_data(config, None, 0))(params, split)
    assert_close(summed, value_and_grad(config, params, batch), rtol=1e-4, atol=1e-4)
    keys = jax.random.split(jax.random.key(0), 4)
    jax.eval_shape(over_data(dropped, None, 0, 0), params, split, keys)


@BOTH
def test_flops_per_token_counts_the_matmuls_of_the_program(config):
    params = make_params(config)
    tokens = jnp.zeros((1, TOKENS), jnp.int32)
    forward = jax.make_jaxpr(functools.partial(transformer.logits, config))(params, tokens)
    flops = 0
    for eqn, times in equations(forward.jaxpr):
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            inner = math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
            flops += 2 * times * inner * math.prod(eqn.outvars[0].aval.shape)
    causal = 6 * config.num_layers * config.d_model * TOKENS
    assert transformer.flops_per_token(config) == 3 * flops / TOKENS - causal


def test_attention_is_cudnn_only_for_16_bits_on_a_gpu(monkeypatch):
    bf16, fp32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
    choose = transformer.attention_implementation
    assert choose(GPT, bf16) is None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert choose(GPT, bf16) == "cudnn"
    assert choose(GPT, fp32) is None
    assert choose(dataclasses.replace(GPT, attention="xla"), bf16) == "xla"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"d_model": 18},
            "d_model: 18 does not divide by num_heads=4; the next size that does is 20",
        ),
        (
            {"num_kv_heads": 3},
            "num_kv_heads: num_heads=4 is not a multiple of 3; try num_kv_heads=1",
        ),
        ({"norm": "batchnorm"}, "norm: 'batchnorm' is unknown; choose one of ('layernorm', 'rmsno"),
        (
            {"positions": "alibi"},
            "positions: 'alibi' is unknown; choose one of ('learned', 'rope')",
        ),
        ({"mlp": "relu"}, "mlp: 'relu' is unknown; choose one of ('gelu', 'swiglu')"),
        ({"remat": True}, "remat: True is unknown; choose one of ('full', 'none')"),
        ({"attention": "flash"}, "attention: 'flash' is unknown; choose one of (None, 'xla', 'cu"),
        ({"num_layers": 0}, "num_layers: 0 is not positive; give at least 1"),
        ({"loss_chunk": 0}, "loss_chunk: 0 is not positive; give at least 1"),
        ({"dropout": 1.0}, "dropout: 1.0 is not in [0, 1); give a probability such as 0.1"),
        (
            {"positions": "rope", "d_model": 12},
            "positions: 'rope' turns pairs, and d_model / num_heads = 3 is odd; try d_model=16",
        ),
    ],
)
def test_a_config_that_does_not_fit_says_where_what_and_the_remedy(change, text):
    with pytest.raises(ValueError, match="TransformerConfig") as error:
        dataclasses.replace(GPT, **change)
    assert f"TransformerConfig.{text}" in str(error.value)


def test_rows_longer_than_the_learned_positions_are_refused():
    with pytest.raises(
        ValueError, match=r"rows of 13 tokens, with learned positions for seq_len=12"
    ):
        transformer.loss_fn(GPT, make_params(GPT), make_batch(tokens=13))
    loss_fn(LLAMA, make_params(LLAMA), make_batch(tokens=13))


def test_mlp_is_its_layers_one_after_another():
    params = mlp.init_params(jax.random.key(0))
    x_key, y_key, weight_key = jax.random.split(jax.random.key(1), 3)
    batch = {
        "x": jax.random.normal(x_key, (6, 16)),
        "y": jax.random.normal(y_key, (6, 8)),
        "weight": jax.random.uniform(weight_key, (6,)),
    }
    x = batch["x"] @ params["in"]["kernel"] + params["in"]["bias"]
    for kernel, bias in zip(params["blocks"]["kernel"], params["blocks"]["bias"], strict=True):
        x = x + jax.nn.gelu(x @ kernel + bias)
    y = x @ params["out"]["kernel"] + params["out"]["bias"]
    expected = jnp.sum(batch["weight"] * jnp.sum((y - batch["y"]) ** 2, axis=1))
    assert_close(mlp.loss_fn(params, batch, None), (expected, jnp.sum(batch["weight"])))
    assert params["blocks"]["kernel"].shape == (4, 32, 32)


def test_the_docstring_example_of_the_config():
    assert doctest.testmod(config_module) == (0, 1)
