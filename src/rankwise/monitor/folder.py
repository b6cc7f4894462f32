"""Write the audits of a training run to a folder. A full disk causes a warning and training continues."""

import logging
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rankwise._internals.files import writable_folder
from rankwise.auditing import Audit
from rankwise.auditing.history import History
from rankwise.errors import InputError, first_line

logger = logging.getLogger("rankwise.monitor")


class AuditFolder:
    """Folder with the audits of one training run, as ``step-N/audit.json``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._warned = folder, False

    def begin(self, step: int, *, resume: bool, writes: bool) -> History:
        """Check the folder before training. If `resume`, return the saved audits before `step`, else none.

        Only the writing process creates the folder, refuses audits of another run and deletes old audits.

        Args:
            step: first step of the run, or first step after the checkpoint.
            resume: True if the audits in the folder belong to this run. Audits from `step` on are removed,
                because training repeats these steps.
            writes: True in the process that writes files.

        Raises:
            InputError: if the folder cannot be written or holds audits of another run.
            RecordError: if an audit is damaged.
        """
        if writes:
            writable_folder(self.folder, "`folder`")
        audits = self._audits()
        if writes and audits and not resume:
            raise InputError(
                f"`folder` {self.folder}",
                expected="a folder without audits of another training",
                got=", ".join(f"step-{number}" for number in sorted(audits)[:4]),
                fix="Choose another folder or remove that one; to resume from a checkpoint with its audits, "
                "set `resume=True`.",
            )
        if writes:
            for path in (path for number, path in audits.items() if number >= step):
                with suppress(OSError):  # the user may keep other files in the folder
                    path.unlink(missing_ok=True)
                    path.parent.rmdir()
        return History(
            (number, Audit.load(path)) for number, path in audits.items() if number < step and resume
        )

    def _audits(self) -> dict[int, Path]:
        return {
            int(path.parent.name.removeprefix("step-")): path
            for path in self.folder.glob("step-*/audit.json")
            if re.fullmatch(r"step-\d+", path.parent.name)
        }

    def write(self, step: int, audit: Audit) -> str:
        """Write an audit. Return an empty string, or the cause of a failure. Log only the first failure."""
        cause = _why_not_written(lambda: audit.save(self.folder / f"step-{step}" / "audit.json"))
        if cause and not self._warned:
            self._warned = True
            logger.warning(
                "step %d: the audit could not be written to %s: %s. Training continues, and audits stay in "
                "`history`. Free space or make the folder writable: `finish` writes all audits.",
                step,
                self.folder,
                cause,
            )
        return cause

    def finish(self, history: History) -> Path | None:
        """Write all audits and an HTML page, and return its path. If writing fails, warn and return None."""
        if cause := _why_not_written(lambda: history.save(self.folder)):
            logger.warning(
                "the history could not be written to %s: %s. Free space and call `finish` again, or write it "
                "elsewhere: `monitor.history.save(FOLDER)`.",
                self.folder,
                cause,
            )
            return None
        return self.folder / "index.html"


def _why_not_written(write: Callable[[], object]) -> str:
    try:
        write()
    except Exception as error:
        return error.got if isinstance(error, InputError) else first_line(error)
    return ""
