# SPDX-License-Identifier: Apache-2.0
"""Save a state while training goes on, and restore the newest save."""

from __future__ import annotations

import atexit
import collections
import contextlib
import datetime
import logging
import os
import shutil
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from zerojax.checkpoint import folder as saves
from zerojax.checkpoint.folder import Save, find_saves
from zerojax.checkpoint.items import ITEMS, DataIterator, data_states, saved_arrays
from zerojax.checkpoint.restore import restore_newest
from zerojax.sharding.plan import Plan
from zerojax.sharding.state import TrainState
from zerojax.training.checks import check_alive, check_plan, check_runs, check_state


class Checkpointer:
    """Saves the states of one run into a folder, asynchronously.

    A save is complete or not there: killed at any moment, a run resumes from the newest complete
    one. Every process of the run makes a Checkpointer of the same folder, which all can reach.

    Args:
      folder: the run's own; made if missing. What an earlier run left unfinished is removed.
      plan: from `make_plan`; the states saved are of this plan.
      keep_latest: how many of the newest saves to keep.
      keep_best: the name of a metric; of the saves that have it, the smallest is kept too.

    Raises:
      OSError: the folder cannot be written to, or another run saves to it.
      ValueError: an argument is not of its kind, or two leaves have one path.

    Example:
      >>> import tempfile, optax, zerojax as zj
      >>> init = lambda key: {"w": jax.random.normal(key, (16, 64))}
      >>> plan = zj.make_plan(init, optax.adam(1e-3), zj.make_mesh(8), stage=3)
      >>> folder = tempfile.mkdtemp()
      >>> with Checkpointer(folder, plan) as checkpoints:
      ...     state = checkpoints.restore() or zj.init_state(plan, jax.random.key(0))
      ...     checkpoints.save(state)
      >>> other = zj.make_plan(init, optax.adam(1e-3), zj.make_mesh(2), stage=1)
      >>> again = zj.restore(folder, other)
      >>> (int(again.step), again.params["w"].addressable_shards[0].data.shape)
      (0, (16, 64))
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        plan: Plan,
        *,
        keep_latest: int = 2,
        keep_best: str | None = None,
    ):
        """Opens the folder, and keeps other runs out of it until `close`."""
        check_plan(plan)
        check_runs(plan)
        if keep_latest < 1:
            raise ValueError(f"keep_latest is {keep_latest}; keep 1 save or more.")
        keys = collections.Counter((x.item, x.key) for x in saved_arrays(plan, plan.abstract_state))
        if twice := sorted(key for (_, key), count in keys.items() if count > 1):
            raise ValueError(
                f"two leaves have the path {twice[0]!r}: a name in the tree holds a '/'. "
                "Rename it, or one would overwrite the other."
            )
        self.folder, self.plan = saves.local_path(folder), plan
        self.keep_latest, self.keep_best = keep_latest, keep_best
        self._lock = saves.open_folder(self.folder) if jax.process_index() == 0 else None
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("opened the folder of saves")
            saves.check_shared(self.folder)
        self._about = _about(plan)
        self._saving: tuple[Path, dict[str, Any]] | None = None
        self._step: int | None = None  # that this run saved or restored last
        # Waits in a thread: Python forgets a thread if Ctrl-C comes while it is joined.
        self._waiting = ThreadPoolExecutor(1)
        self._done: Future[None] | None = None
        self._closed = False
        # Folders made at once: where their thread fails, others wait for them for minutes.
        options = ocp.options.AsyncOptions(
            post_finalization_callback=self._finalize, create_directories_asynchronously=False
        )
        handler = ocp.CompositeCheckpointHandler(*ITEMS)
        self._orbax = ocp.AsyncCheckpointer(handler, async_options=options)
        _OPEN.add(self)

    def save(
        self,
        state: TrainState,
        *,
        data: DataIterator | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Begins to save and returns; the state may be donated to the next step at once.

        It waits for the save before, if that is not complete. A step that this run saved or
        restored already is not saved again.

        Args:
          state: of the plan; its `step` names the save.
          data: the iterator of batches, saved as the dict that its `get_state()` returns.
          metrics: numbers of this step, among them that of `keep_best`.

        Raises:
          OSError: the save before could not be written; earlier ones are as they were.
          ValueError: the state is not of the plan or was donated, `data` is not for JSON, the
            folder has a newer save, or one of this step by another run; after `close`.
        """
        if self._closed:
            raise ValueError("this Checkpointer is closed; make another of the same folder.")
        check_alive(state)
        check_state(self.plan, state)
        self.wait()
        step = int(state.step)
        target = self.folder / str(step)
        newest = max((s.step for s in self.saves()), default=-1)
        if newest == step == self._step:
            return
        if newest >= step:
            what = "newer than this one" if newest > step else "made by another run than this one"
            raise ValueError(
                f"{self.folder} holds a save of step {newest}, {what} of step {step}: a run goes "
                "on from its newest save, by restore(). Give this run a folder of its own."
            )
        manifest = {
            "step": step,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "metrics": {name: float(x) for name, x in (metrics or {}).items()},
            "data": None if data is None else data_states(data),
            **self._about,
        }
        found = [x for x in saved_arrays(self.plan, state) if x.array.size]  # Orbax: not 0
        trees = {item: {x.key: x.array for x in found if x.item == item} for item in ITEMS}
        args = {item: ocp.args.PyTreeSave(tree) for item, tree in trees.items() if tree}
        self._saving = Path(f"{target}{saves.WRITING}"), manifest
        with _naming(target):
            self._orbax.save(target, args=ocp.args.Composite(**args))
        self._step = step
        self._finish()

    def restore(self, *, data: DataIterator | None = None) -> TrainState | None:
        """The state of the newest save that is whole, on the plan; None if there is no save.

        A damaged save is reported by a warning and set aside under another name. `data` goes on
        from where it was. Raises as `restore` does.
        """
        self.wait()
        if not self.saves():
            return None
        state = restore_newest(self.folder, self.plan, data, aside=True)
        self._step = int(state.step)
        return state

    def saves(self) -> list[Save]:
        """The complete saves, the newest first."""
        try:
            return find_saves(self.folder)
        except FileNotFoundError:
            return []

    def wait(self) -> None:
        """Returns when the last save is complete. Raises OSError if it could not be written."""
        if self._saving is None:
            return
        try:
            with _naming(self._saving[0]):
                self._finish().result()
        except OSError:
            self._clear()
            raise
        self._clear()  # after Ctrl-C not: it is still being written

    def check(self) -> None:
        """Raises OSError if the save under way has failed; waits for nothing."""
        if self._saving is not None and self._finish().done():
            with _naming(self._saving[0]):
                self._finish().result()

    def close(self) -> None:
        """Waits for the last save, and lets other runs have the folder.

        Python lets no program that ends finish a save: without this the last one may be lost.
        """
        if self._closed:
            return
        try:
            self.wait()
        finally:
            self._closed = True
            self._waiting.shutdown()
            self._orbax.close()
            if self._lock is not None:
                saves.close_folder(self._lock)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _finish(self) -> Future[None]:
        """What is done when the last save is complete and older ones are removed, or it failed."""

        def finish() -> None:
            self._orbax.wait_until_finished()
            if jax.process_index() == 0:
                saves.prune(self.saves(), self.keep_latest, self.keep_best)

        if self._done is None:
            self._done = self._waiting.submit(finish)
        return self._done

    def _clear(self) -> None:
        """Removes what the last save left unfinished, if anything."""
        assert self._saving is not None
        unfinished, self._saving, self._done = self._saving[0], None, None
        if jax.process_index() == 0 and unfinished.exists():
            shutil.rmtree(unfinished)

    def _finalize(self) -> None:
        """Called on process 0 when all arrays are written, before the folder gets its name."""
        assert self._saving is not None
        saves.finalize(*self._saving)


_OPEN: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


@atexit.register
def _say_lost() -> None:
    """Says which saves were cut off: threads that write can start no more work by now."""
    for each in list(_OPEN):
        try:
            each.wait()
        except (OSError, RuntimeError):
            logging.getLogger("zerojax").error(
                f"the last save to {each.folder} is lost: the program ended before it was "
                "complete. Call close() of the Checkpointer, or use it in a `with` statement."
            )


os.register_at_fork(after_in_child=_OPEN.clear)  # a child's end is no end of the run


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Raises OSError, which names the save, for whatever Orbax or the file system raises."""
    try:
        yield
    except Exception as error:
        what = str(error).strip().splitlines()
        said = f"{type(error).__name__}: {what[0] if what else 'no reason given'}"
        path = path.with_name(path.name.removesuffix(saves.WRITING))
        raise OSError(
            getattr(error, "errno", None) or 0,
            f"{path}: this save could not be written ({said}); earlier saves are as they were. "
            "Make room or permission there, or give another folder",
        ) from error


def _about(plan: Plan) -> dict[str, Any]:
    """What the manifests of all saves of a plan have in common."""
    leaves: dict[str, dict[str, Any]] = {item: {} for item in ITEMS}
    for item, key, array in saved_arrays(plan, plan.abstract_state):
        spec = [list(x) if isinstance(x, tuple) else x for x in array.sharding.spec]
        leaves[item][key] = {"shape": list(array.shape), "dtype": str(array.dtype), "spec": spec}
    dtypes = {name: str(x and jax.numpy.dtype(x)) for name, x in vars(plan.precision).items()}
    libraries = ("zerojax", "jax", "optax", "orbax-checkpoint")
    return {
        "format": saves.FORMAT,
        "versions": {name: version(name) for name in libraries},
        "plan": {
            "stage": plan.stage.number,
            "partitioner": type(plan.partitioner).__name__.lower(),
            "mesh": dict(plan.mesh.shape),
            "processes": jax.process_count(),
            "keys": str(plan.abstract_state.key.dtype),
            "precision": dtypes,
        },
        "leaves": leaves,
    }
