"""The folder of a monitor: the audits of one training, and a full disk that does not end it."""

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from rankwise._internals.files import writable_folder, write_file
from rankwise._internals.forward import Batch, tensors_of
from rankwise.auditing import Audit
from rankwise.auditing.history import History
from rankwise.errors import InputError, first_line

logger = logging.getLogger("rankwise.monitor")
PROBE = "probe.safetensors"


class Record:
    """What a monitor writes of one training.

    Args:
        folder: where to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._warned = folder, False

    def begin(self, step: int, resume: bool, writes: bool) -> History:
        """See before the first audit that the folder can be written and holds no other training.

        Args:
            step: the first of the training, or the first after the checkpoint it goes on from.
            resume: whether audits in the folder are of this training: those before ``step`` are read; the
                others are removed, as the training comes to their steps again.
            writes: whether this process is the one that writes.

        Returns:
            The audits of the same training before ``step``.

        Raises:
            InputError: if it cannot be written, or holds audits that are not to be gone on from.
            RecordError: if one of them is damaged.
        """
        if writes:
            writable_folder(self.folder, "`folder`")
        found = {
            int(path.parent.name.removeprefix("step-")): path
            for path in self.folder.glob("step-*/audit.json")
            if re.fullmatch(r"step-\d+", path.parent.name)
        }
        if writes and found and not resume:
            raise InputError(
                f"`folder` {self.folder}",
                expected="a folder without audits of another training",
                got=", ".join(f"step-{at}" for at in sorted(found)[:4]),
                fix="Choose another folder or remove that one; to go on from a checkpoint with its audits, "
                "set `resume=True`.",
            )
        if writes:
            for path in (path for at, path in found.items() if at >= step):
                path.unlink(missing_ok=True)
                with suppress(OSError):  # of what else is in it
                    path.parent.rmdir()
            with suppress(OSError):  # of a training that was stopped; what stops this one writes it anew
                (self.folder / PROBE).unlink(missing_ok=True)
        return History((at, Audit.load(path)) for at, path in found.items() if at < step and resume)

    def write(self, step: int, found: Audit) -> str:
        """Write an audit; warn the first time that it cannot be written.

        Args:
            step: of the audit.
            found: the audit.

        Returns:
            Why it was not written; empty where it was.
        """
        cause = _cause(lambda: found.save(self.folder / f"step-{step}" / "audit.json"))
        if cause and not self._warned:
            self._warned = True
            logger.warning(
                "step %d: the audit could not be written to %s: %s. The training goes on, and audits stay in "
                "`history`. Make room or make it writable: `finish` writes them all.",
                step,
                self.folder,
                cause,
            )
        return cause

    def write_probe(self, batches: Sequence[Batch]) -> str:
        """Write the probe beside the audits, so that a stop can be looked into.

        Args:
            batches: of the probe.

        Returns:
            Why it was not written; empty where it was.
        """
        tensors = {
            f"{at}.{name}": tensor.detach().cpu().contiguous()
            for at, batch in enumerate(batches)
            for name, tensor in tensors_of(batch).items()
        }
        path = self.folder / PROBE
        return _cause(lambda: write_file(path, lambda partial: save_file(tensors, partial), "probe"))

    def finish(self, history: History) -> Path | None:
        """Write all audits and their page.

        Args:
            history: the audits.

        Returns:
            The page; None where it could not be written, which a warning says.
        """
        if cause := _cause(lambda: history.save(self.folder)):
            logger.warning(
                "the history could not be written to %s: %s. Make room and call `finish` again, or write it "
                "elsewhere: `monitor.history.save(FOLDER)`.",
                self.folder,
                cause,
            )
            return None
        return self.folder / "index.html"


def _cause(write: Callable[[], object]) -> str:
    """Why nothing was written; empty where it was."""
    try:
        write()
    except (InputError, SafetensorError) as error:
        return error.got if isinstance(error, InputError) else first_line(error)
    return ""
