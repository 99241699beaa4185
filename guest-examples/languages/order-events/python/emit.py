"""Messages to others, which the host sends after the commit. Yours to change.

A component that imports this needs the world of version 0.2 of the contract, and its deployment
needs the grant for it: `oncebox deploy --grant emit`."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from componentize_py_types import Err
from wit_world.imports import emit as contract

__all__ = ["EmitError", "cancel", "emit"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


class EmitError(Exception):
    """A message cannot be sent or withdrawn. It fails the message that is handled."""

    def __init__(self, error: contract.Error):
        # `Error_Refused`, `Error_Limit` or `Error_Database`.
        super().__init__(f"{type(error).__name__.removeprefix('Error_').lower()}: {error.value}")


def emit(
    destination: str,
    event_type: str,
    payload: Any,
    *,
    key: str | None = None,
    after_ms: int | None = None,
    at: datetime | None = None,
    cancel_token: str | None = None,
    headers: Sequence[tuple[str, bytes]] = (),
) -> str:
    """Send a message after the commit, if the message that is handled commits; answers its id.

    The destination is `kafka:` and a topic, or `inbox:` and a consumer of the tenant. The payload
    goes as JSON; None is a message without one. Messages of one destination and key are sent in the
    order of their due times, then of their calls.
    """
    message = contract.Outgoing(
        event_type=event_type,
        content_type=None if payload is None else "application/json",
        headers=list(headers),
        payload=None if payload is None else json.dumps(payload).encode(),
    )
    options = contract.Options(
        key=None if key is None else key.encode(),
        due=_due(after_ms, at),
        cancel_token=cancel_token,
        cause=None,
    )
    try:
        return contract.emit(destination, message, options)
    except Err as error:
        raise EmitError(error.value) from None


def cancel(token: str) -> bool:
    """Withdraw what this consumer sent with the token and no relay has begun to send. True if there was any."""
    try:
        return contract.cancel(token)
    except Err as error:
        raise EmitError(error.value) from None


def _due(after_ms: int | None, at: datetime | None) -> contract.Due:
    if after_ms is not None:
        return contract.Due_After(after_ms)
    if at is not None:
        return contract.Due_At((at - _EPOCH) // _MILLISECOND)
    return contract.Due_Now()
