"""Teach a small transformer policy to sort digits by GRPO, from scratch, with samples and losses of jaxsoftmax.

    uv run examples/grpo_tiny.py              # on a CPU: four digits, in minutes; a bar says how long it still takes
    uv run examples/grpo_tiny.py --digits 5   # a longer task
    uv run examples/grpo_tiny.py --resume     # go on after Ctrl-C, with identical results
    # As many logits as a large model has, on a GPU, where kernels that keep them in registers take the last layer in 16 bits:
    uv run --extra cuda13 examples/grpo_tiny.py --vocabulary 151936 --batch 4096 --last-layer bfloat16

A problem is a row of random digits, and its answer the same digits in rising order. The reward of an answer is the share of
its places that hold the right digit, about 0.1 for an untrained policy. No right answer is ever shown to the policy. Each
step draws problems, samples a group of answers to each, and compares the rewards of a group with each other (GRPO: Shao et
al. 2024, arXiv:2402.03300). Some updates on these answers follow. Their loss has the clipped ratio of probabilities, the
divergence from the reference policy, which is the untrained one, and a bonus for entropy.

Answers and their log-probabilities come from jaxsoftmax.categorical. The loss needs the log-probabilities of the same
tokens again, with gradients, and the entropies of their distributions. `log_probs` computes both from the hidden states.

--vocabulary gives the policy more logits than there are digits, to measure speed and memory. The classes that are no digits
are masked by a bias, for samples and losses alike, so that the ratio of the first update is 1. To learn them away is no
choice here: almost no answer of an untrained policy would hold a digit, all rewards of a group would be 0, and GRPO learns
from differences within a group alone. (A pretrained model has learned which tokens to use before.) The masked logits are
computed as all others are, and are part of the memory and the time. --last-layer rounds what the last layer multiplies, for
samples and losses alike.

Reward, entropy and divergence are printed, and drawn in learning.png. Results and checkpoints go to --out, too.
"""

from examples import startup

if __name__ == "__main__":
    startup.importing("JAX, Flax and what else is needed")

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from tqdm import tqdm

import jaxsoftmax
from examples import train_tiny_lm
from examples.train_tiny_lm import InputError, Parser
from jaxsoftmax.rl import group_advantages, policy_gradient_loss

DIGITS = 10  # the classes of answers; as a token of the input, the next number asks for the answer
MASKED = -1e9  # added to logits: their exponentials are 0, and have no derivative
TESTED = 1000  # problems that the finished policy is tested on
# Results of each step, each a mean over its answers: the share of right digits and of answers that are right as a whole, and
# over the tokens of its answers the entropy of the policy and its divergence from the reference policy, in nats.
METRICS = {"reward": "reward", "solved": "solved", "entropy": "entropy (nats)", "kl": "KL to the reference (nats)"}
# The settings that determine the numbers of a run. A resumed run must share them with the run that it continues.
RECORDED = (
    "steps",
    "batch",
    "group",
    "digits",
    "updates",
    "width",
    "heads",
    "layers",
    "attention",
    "vocabulary",
    "last_layer",
    "lr",
)
RECORDED += ("temperature", "clip", "kl_weight", "entropy_weight", "seed")


def log_probs(hidden: jax.Array, weight: jax.Array, tokens: jax.Array, bias: jax.Array, temperature: float) -> tuple[Any, Any]:
    """Returns the log-probabilities of tokens and the entropies of their distributions."""
    options = {"bias": bias, "temperature": temperature, "return_entropy": True}
    log_p, entropy = jaxsoftmax.linear_log_probs(hidden, weight, tokens, **options)
    return log_p, entropy


class Policy(nnx.Module):
    """Tokens (batch, time) in, hidden states (batch, time, width) out, which `weight` turns into logits of the next digit.

    The last layer is not the embedding again: an untrained policy would repeat its input, and try nothing else.
    """

    def __init__(self, args: argparse.Namespace, rngs: nnx.Rngs):
        attend = train_tiny_lm.ATTENTIONS[args.attention](args.deterministic)
        self.model = train_tiny_lm.LanguageModel(DIGITS + 1, args.width, args.heads, args.layers, attend, args.dtype, rngs)
        initial = nnx.initializers.lecun_normal()
        self.weight = nnx.Param(initial(rngs.params(), (args.width, args.vocabulary), jnp.float32))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.model.hidden(tokens)


class State(NamedTuple):
    """Everything that a step changes; its problems and samples follow from the seed and `step` alone."""

    step: jax.Array
    params: nnx.State
    optimizer: optax.OptState
    history: jax.Array  # (steps, metrics)


class Run(NamedTuple):
    """The first state of a run, and its compiled functions."""

    state: State
    train: Callable[[State, nnx.State, int], State]  # (state, parameters of the reference, stop): steps until `stop`
    sample: Callable[..., tuple[jax.Array, jax.Array]]  # (params, problems, key, temperature): answers and log-probabilities
    score: Callable[..., tuple[jax.Array, jax.Array]]  # (params, problems, answers): log-probabilities and entropies


def make_run(args: argparse.Namespace) -> Run:
    """Builds the policy and compiles nothing yet."""
    init_key, data_key = jax.random.split(jax.random.key(args.seed))
    graph, params = nnx.split(Policy(args, nnx.Rngs(init_key)))
    schedule = partial(train_tiny_lm.learning_rate, peak=args.lr, steps=args.steps * args.updates)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.98))
    bias = jnp.where(jnp.arange(args.vocabulary) < DIGITS, 0.0, MASKED)
    compiled = partial(jax.jit, compiler_options={"xla_gpu_deterministic_ops": args.deterministic})

    def sample(
        params: nnx.State, problems: jax.Array, key: jax.Array, temperature: float = args.temperature
    ) -> tuple[jax.Array, jax.Array]:
        policy = nnx.merge(graph, params)

        def answer(tokens: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            key, place = inputs
            hidden = jax.lax.dynamic_index_in_dim(policy(tokens[:, :-1]), place, 1, keepdims=False)
            factors = hidden.astype(args.last_layer), policy.weight[...].astype(args.last_layer)
            logits = jnp.dot(*factors, preferred_element_type=jnp.float32) + bias[None, :]
            token, log_p = jaxsoftmax.categorical(key, logits, temperature=temperature, return_log_prob=True)
            return jax.lax.dynamic_update_index_in_dim(tokens, token, place + 1, 1), (token, log_p)

        tokens = jnp.pad(problems, ((0, 0), (0, args.digits + 1)), constant_values=DIGITS)
        inputs = jax.random.split(key, args.digits), args.digits + jnp.arange(args.digits)
        _, (answers, log_p) = jax.lax.scan(answer, tokens, inputs)
        return answers.T, log_p.T

    def score(params: nnx.State, problems: jax.Array, answers: jax.Array) -> tuple[jax.Array, jax.Array]:
        policy = nnx.merge(graph, params)
        ask = jnp.full((len(problems), 1), DIGITS, answers.dtype)
        hidden = policy(jnp.concatenate([problems, ask, answers[:, :-1]], 1))[:, args.digits :]
        return log_probs(hidden.astype(args.last_layer), policy.weight[...], answers, bias, args.temperature)

    def step(reference: nnx.State, state: State) -> State:
        problem_key, sample_key = jax.random.split(jax.random.fold_in(data_key, state.step))
        problems = jax.random.randint(problem_key, (args.batch // args.group, args.digits), 0, DIGITS)
        problems = jnp.repeat(problems, args.group, axis=0)
        answers, old_log_p = sample(state.params, problems, sample_key)
        right = answers == jnp.sort(problems, axis=1)
        advantages = group_advantages(right.mean(1).reshape(-1, args.group)).reshape(-1)
        reference_log_p, _ = score(reference, problems, answers)

        def loss(params: nnx.State) -> tuple[jax.Array, jax.Array]:
            log_p, entropy = score(params, problems, answers)
            value = policy_gradient_loss(
                log_p,
                old_log_p,
                advantages,
                clip=args.clip,
                reference_log_p=reference_log_p,
                kl_weight=args.kl_weight,
                entropy=entropy,
                entropy_weight=args.entropy_weight,
            )
            return value, entropy.mean()

        def update(carry: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], jax.Array]:
            params, optimizer_state = carry
            gradient, entropy = jax.grad(loss, has_aux=True)(params)
            updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
            return (optax.apply_updates(params, updates), optimizer_state), entropy

        carry = state.params, state.optimizer
        (params, optimizer_state), entropies = jax.lax.scan(update, carry, length=args.updates)
        # All are of the policy that gave the answers. This estimate of the divergence varies less than that of the loss, which
        # is large for answers that the policy has unlearned.
        divergence = (old_log_p - reference_log_p).mean()
        metrics = jnp.stack([right.mean(), right.all(1).mean(), entropies[0], divergence])
        return State(state.step + 1, params, optimizer_state, state.history.at[state.step].set(metrics))

    # The bounds are no constants, as in train_tiny_lm.py: one program serves every count of steps.
    @partial(compiled, donate_argnums=0)
    def train(state: State, reference: nnx.State, stop: int) -> State:
        return jax.lax.fori_loop(state.step, stop, lambda _, state: step(reference, state), state)

    state = State(jnp.int32(0), params, optimizer.init(params), jnp.zeros((args.steps, len(METRICS)), jnp.float32))
    return Run(state, train, compiled(sample), compiled(score))


def answers_per_second(args: argparse.Namespace, steps: int, record: dict[str, Any]) -> float:
    return steps * args.batch / record["seconds"]


def shown(metrics: np.ndarray) -> str:
    return "reward {:.3f}, solved {:.3f}, entropy {:.3f}, KL {:.3f}".format(*metrics)


def train(args: argparse.Namespace, run: Run, state: State, record: dict[str, Any]) -> State:
    """Trains to the last step; after a Ctrl-C, saves and raises."""
    step, reference = int(state.step), jax.tree.map(jnp.copy, run.state.params)  # copied, as steps overwrite theirs
    options: dict[str, Any] = {"unit": "step", "mininterval": 0.5, "dynamic_ncols": True, "bar_format": train_tiny_lm.BAR}
    with tqdm(total=args.steps, initial=step, **options) as bar, train_tiny_lm.deferred_interrupt() as interrupted:
        if step < args.steps:
            state = jax.block_until_ready(run.train(state, reference, step))  # no steps: compiles, which no speed includes
            bar.unpause()
        while step < args.steps:
            began = time.perf_counter()
            marks = (train_tiny_lm.STEPS_PER_CALL, args.print_every, args.checkpoint_every)
            stop = min(args.steps, *(step + every - step % every for every in marks))
            state = run.train(state, reference, stop)
            metrics = np.asarray(state.history)[step:stop].mean(0)
            if not np.isfinite(metrics).all():
                raise FloatingPointError(f"not finite at step {stop}: {shown(metrics)}: try a smaller --lr")
            record["seconds"] += time.perf_counter() - began
            bar.set_postfix_str(f"{answers_per_second(args, stop, record):,.0f} answers/s", refresh=False)
            bar.update(stop - step)
            step = stop
            if step % args.print_every == 0 or step == args.steps:
                bar.write(f"step {step}: {shown(metrics)}", file=sys.stdout)
            if step % args.checkpoint_every == 0 or step == args.steps or interrupted.is_set():
                train_tiny_lm.save_checkpoint(args.out, state, record)
            if interrupted.is_set():
                raise KeyboardInterrupt(f" after step {step}; --resume continues from there")
    return state


def plot(path: Path, history: np.ndarray, title: str) -> None:
    figure = Figure(figsize=(7, 8), layout="constrained")  # no pyplot: needs no display, and leaves no state behind
    figure.suptitle(title)
    span = max(1, min(20, len(history) // 10))
    values = dict(zip(METRICS, history.T, strict=True))
    for axes, names in zip(figure.subplots(3, sharex=True), (("reward", "solved"), ("entropy",), ("kl",)), strict=True):
        for name in names:
            smooth = np.convolve(values[name], np.full(span, 1 / span), mode="valid")
            axes.plot(np.arange(span, len(history) + 1), smooth, label=name)
        axes.set(ylabel=", ".join(METRICS[name] for name in names))
        axes.grid(alpha=0.3)
        if len(names) > 1:
            axes.legend()
    axes.set(xlabel=f"step (means of {span} steps)")
    with train_tiny_lm.replaced(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def report(args: argparse.Namespace, run: Run, state: State, record: dict[str, Any]) -> None:
    """Tests the policy without noise, prints the result, and writes the curves and the numbers."""
    history = np.asarray(state.history)
    problems = jax.random.randint(jax.random.fold_in(jax.random.key(args.seed), 1), (TESTED, args.digits), 0, DIGITS)
    answers, _ = run.sample(state.params, problems, jax.random.key(0), 0.0)  # the key plays no part
    solved = float((answers == jnp.sort(problems, axis=1)).all(1).mean())
    speed = answers_per_second(args, args.steps, record)
    print(f"sampled and learned from {speed:,.0f} answers/s, compilation left out")
    memory = train_tiny_lm.peak_memory()
    print(f"the most likely answers: {solved:.1%} of {TESTED} problems solved, such as")
    for problem, answer in zip(np.asarray(problems[:5]), np.asarray(answers), strict=False):
        print(f"  {''.join(map(str, problem))} -> {''.join(map(str, answer))}")
    results = {
        "settings": record["settings"],
        "solved": solved,
        "answers_per_second": speed,
        "peak_bytes_in_use": memory,
        "history": dict(zip(METRICS, history.T.tolist(), strict=True)),
    }
    plot(args.out / "learning.png", history, f"GRPO: a policy learns to sort {args.digits} digits")
    with train_tiny_lm.replaced(args.out / "results.json") as temporary:
        temporary.write_text(json.dumps(results, indent=1) + "\n")
    print(f"wrote {args.out / 'learning.png'} and {args.out / 'results.json'}")


def not_negative(text: str) -> float:
    return 0.0 if text == "0" else train_tiny_lm.positive(float)(text)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    description = "Teach a small transformer policy to sort digits by GRPO."
    codes = "Exit codes: 0 done, 1 cannot go on, 2 bad input (nothing was written), 130 interrupted (--resume goes on)."
    parser = Parser(description=description, epilog=codes)

    def add(name: str, kind: Callable[[str], Any], default: Any, text: str) -> None:
        parser.add_argument(name, type=kind, default=default, help=f"{text} (default: %(default)s)")

    whole, number = train_tiny_lm.positive(int), train_tiny_lm.positive(float)
    add("--steps", whole, 600, "steps, each of which samples a batch of answers and learns from them")
    add("--batch", whole, 512, "answers in a step")
    add("--group", whole, 8, "answers to the same problem, compared with each other; must divide the batch")
    add("--digits", whole, 4, "digits of a problem")
    add("--updates", whole, 2, "optimizer steps on the same answers")
    add("--width", whole, 64, "features of each token inside the policy")
    add("--heads", whole, 4, "attention heads; must divide the width into even parts")
    add("--layers", whole, 1, "transformer layers")
    add("--vocabulary", whole, DIGITS, f"logits of the policy, {DIGITS} or more, of which the first are the digits")
    add("--lr", number, 1e-3, "highest learning rate")
    add("--temperature", number, 1.0, "of the policy, as it samples and as it learns")
    add("--clip", number, 0.2, "how far the ratio of probabilities may be from 1 until its gradient ends")
    add("--kl-weight", not_negative, 0.001, "weight in the loss of the divergence from the reference policy")
    add("--entropy-weight", not_negative, 0.05, "weight in the loss of the entropy, which is rewarded")
    add("--seed", train_tiny_lm.seed, 0, "fixes the run, from the first parameters to the last sample")
    add("--print-every", whole, 50, "steps between lines that are printed")
    add("--checkpoint-every", whole, 100, "steps between checkpoints")
    add("--out", Path, Path("runs/grpo_tiny"), "where the results go; an older run there stays until this one has its own")
    dtypes = ("float32", "bfloat16")
    parser.add_argument(
        "--last-layer", choices=dtypes, default="float32", help="dtype that its products take (default: float32)"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out, bit for bit")
    args = parser.parse_args(argv)
    if args.width % args.heads or args.width // args.heads % 2:
        raise InputError(f"--heads {args.heads} does not divide --width {args.width} into equal, even parts")
    if args.group < 2 or args.batch % args.group:
        raise InputError(f"--group {args.group} does not divide --batch {args.batch} into groups of 2 or more")
    if args.vocabulary < DIGITS:
        raise InputError(f"--vocabulary {args.vocabulary} is less than {DIGITS}, the number of digits")
    if args.out.exists() and not args.out.is_dir():
        raise InputError(f"--out {args.out} is not a directory")
    # For the functions that train_tiny_lm.py shares.
    args.context, args.dtype, args.deterministic, args.attention = 2 * args.digits, "float32", True, None
    return args


def learn(args: argparse.Namespace) -> None:
    args.attention, line = train_tiny_lm.choose_attention(args)
    settings = {name: getattr(args, name) for name in RECORDED}
    with train_tiny_lm.memory_errors("the policy"):
        run = make_run(args)
        state, record = run.state, {"settings": settings, "seconds": 0.0}
        if args.resume:
            save, record, arrays = train_tiny_lm.read_checkpoint(args.out, settings, "--resume")
            state = train_tiny_lm.laid_out(state, arrays, save, "--resume")
        train_tiny_lm.make_folder(args.out)
        print(line)
        report(args, run, train(args, run, state, record), record)


def main(argv: list[str] | None = None) -> int:
    return train_tiny_lm.exit_code(__file__, lambda: learn(parse_arguments(argv)))


if __name__ == "__main__":
    startup.imported()
    sys.exit(main())
