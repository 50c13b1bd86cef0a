"""The training step that is timed is the one that a run of the config takes."""

import hashlib

import jax
import pytest

from cropr_jax import models
from cropr_jax.bench import programs, spec
from cropr_jax.host import config_file
from cropr_jax.train import recipe, sharding
from cropr_jax.train.state import create_state
from cropr_jax.train.step import jit_train, run_key

pytestmark = pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")

BATCH = 16
FIELDS = {
    "model.depth": 2,
    # As many steps as the benchmark pretends, so that the learning rates are the same.
    "total_epochs": 2.0,
    "total_steps": programs.STEPS,
    "optimizer.warmup_epochs": 2.0 * programs.WARMUP / programs.STEPS,
    "optimizer.layer_decay": 0.5,
    "optimizer.clip_norm": 0.01,
    "optimizer.ema": 0.9,
    "accum_steps": 2,
    "compiler_options": {"xla_cpu_enable_fast_math": True},
}


def write(folder, **changes):
    """A config file with these fields."""
    path = folder / "made.py"
    lines = [
        "import tiny_config",
        "def get_config(arg=''):",
        "    config = tiny_config.get_config()",
    ]
    lines += [f"    config.{name} = {value!r}" for name, value in (FIELDS | changes).items()]
    path.write_text("\n".join([*lines, "    return config", ""]))
    return str(path)


def digest(function, *arguments):
    """Of a program, as XLA gets it."""
    return hashlib.sha256(function.lower(*arguments).as_text().encode()).hexdigest()


class Lowered(programs.Program):
    """What would be compiled, and with which options."""

    def __init__(self, function, batch_size, batch, state, *_, options, **__):
        self.batch_size, self.options = batch_size, options
        self.digest = digest(function, state, *batch)


def timed(path):
    """What the benchmark compiles of a config file."""
    model = models.create(spec.model_fields(path))
    training = programs.Training(model, programs.Pool(), spec.training_fields(path))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(programs, "Program", Lowered)
        return training.compile(BATCH)


def of_run(path):
    """What a run compiles of it."""
    step = recipe.resolve(config_file.load(path)).training

    def make(params):
        return create_state(params, step.optimizer, step.trainable, step.ema is not None)

    state = jax.eval_shape(make, models.abstract_params(step.model))
    batch = sharding.place(step.task.example_batch(step.model, BATCH), step.mesh)
    function = jit_train(step, sharding.state_shardings(state, step.mesh))
    return digest(function, state, batch, run_key(0))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A config file that uses all of it, and what is timed of it."""
    path = write(tmp_path_factory.mktemp("config"))
    return path, timed(path)


def test_the_step_is_that_of_a_run(whole):
    path, program = whole
    assert program.digest == of_run(path)
    assert program.options == FIELDS["compiler_options"]


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("optimizer.layer_decay", 1.0),
        ("optimizer.clip_norm", None),
        ("optimizer.ema", None),
        ("accum_steps", 1),
    ],
)
def test_each_field_reaches_the_step(whole, tmp_path, name, off):
    _, program = whole
    path = write(tmp_path, **{name: off})
    without = timed(path).digest
    assert without != program.digest
    assert without == of_run(path)
