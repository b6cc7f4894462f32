"""A small picture of a matrix, as audit files hold it."""

import base64
import zlib
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from rankwise._internals.records import Record

MOST_SIDE = 128
"""Rows and columns of a picture."""


class MatrixPicture(Record):
    """The matrix of a head on one sequence, without padding; beyond 128 tokens, means over blocks of it."""

    rows: Annotated[int, Field(gt=0, le=MOST_SIDE)]
    columns: Annotated[int, Field(gt=0, le=MOST_SIDE)]
    """Of the picture."""
    tokens: Annotated[int, Field(gt=0, lt=2**53)]
    sources: Annotated[int, Field(gt=0, lt=2**53)]
    """Rows T and columns S of the matrix. Row t of it lies in row t·rows//tokens of the picture."""
    largest: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """The largest finite magnitude of the picture, which the values are shares of."""
    values: str
    """Shares in float16, little-endian, row by row; zlib, base64."""
    row_tokens: str = ""
    column_tokens: str = ""
    """Which of the audit's ``texts`` the rows and columns are; empty where it has none of them."""

    @classmethod
    def of(
        cls,
        picture: NDArray[np.float32],
        tokens: int,
        sources: int,
        row_tokens: str = "",
        column_tokens: str = "",
    ) -> "MatrixPicture":
        """Keep a picture.

        Args:
            picture: (rows, columns).
            tokens: rows of the matrix that it is of.
            sources: columns of that.
            row_tokens: name of the text that the rows are.
            column_tokens: likewise.
        """
        largest = float(np.abs(picture, where=np.isfinite(picture), out=np.zeros_like(picture)).max())
        with np.errstate(over="ignore", invalid="ignore"):
            shares = (picture / (largest or 1.0)).astype("<f2")
        packed = base64.b64encode(zlib.compress(shares.tobytes())).decode()
        rows, columns = picture.shape
        return cls(
            rows=rows,
            columns=columns,
            tokens=tokens,
            sources=sources,
            largest=largest,
            values=packed,
            row_tokens=row_tokens,
            column_tokens=column_tokens,
        )

    def matrix(self) -> NDArray[np.float32]:
        """The picture as numbers (rows, columns), to 3 significant digits of the largest."""
        shares = np.frombuffer(_unpacked(self), dtype="<f2").reshape(self.rows, self.columns)
        return shares.astype(np.float32) * np.float32(self.largest)

    @model_validator(mode="after")
    def _holds_what_it_says(self) -> "MatrixPicture":
        _unpacked(self)
        return self


def _unpacked(picture: MatrixPicture) -> bytes:
    wanted = 2 * picture.rows * picture.columns
    try:
        shares = zlib.decompressobj().decompress(base64.b64decode(picture.values, validate=True), wanted + 1)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"values should be float16 in zlib in base64: {error}") from None
    if len(shares) != wanted:
        raise ValueError(f"values should hold {picture.rows}×{picture.columns} numbers")
    return shares
