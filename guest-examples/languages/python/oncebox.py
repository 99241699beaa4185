"""What a handler needs beside the contract: native values instead of variants, and a failure
that leaves its text. Yours to change."""

import json
import traceback
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn

from componentize_py_types import Err
from wit_world import exports
from wit_world.imports import log, sql, types
from wit_world.imports.types import Message

__all__ = ["Message", "SqlError", "execute", "handler", "park", "parse", "query", "reject", "retry"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class SqlError(Exception):
    """A statement failed. The transaction is lost unless it happened after a savepoint."""

    def __init__(self, error: sql.Error):
        database = error.value if isinstance(error, sql.Error_Database) else None
        super().__init__(f"{database.sqlstate}: {database.message}" if database else str(error))
        #: PostgreSQL's code, such as `23505` for a key that is there already.
        self.sqlstate = database and database.sqlstate
        self.constraint = database and database.constraint


def reject(reason: str) -> NoReturn:
    """This message can never succeed."""
    raise Err(types.Failure_Reject(reason))


def retry(after_ms: int | None = None) -> NoReturn:
    """Run it again, after milliseconds or after the consumer's backoff."""
    raise Err(types.Failure_Retry(after_ms))


def park(reason: str) -> NoReturn:
    """A person has to look at this message first."""
    raise Err(types.Failure_Park(reason))


def execute(statement: str, *params: Any) -> int:
    """Run a statement for its effect; answers the number of rows it touched."""
    try:
        return sql.execute(statement, [_to_value(param) for param in params])
    except Err as error:
        raise SqlError(error.value) from None


def query(statement: str, *params: Any) -> list[dict[str, Any]]:
    """Run a statement and read its rows, as dictionaries by column name."""
    try:
        answer = sql.query(statement, [_to_value(param) for param in params])
    except Err as error:
        raise SqlError(error.value) from None
    names = [column.name for column in answer.columns]
    return [dict(zip(names, map(_from_value, row))) for row in answer.rows]


def parse(message: Message) -> Any:
    """The payload as JSON. What is no JSON can never succeed."""
    if message.payload is None:
        reject("the message has no payload")
    try:
        return json.loads(message.payload)
    except ValueError as error:
        reject(f"malformed payload: {error}")


def handler(handle: Callable[[Message], Any]) -> type:
    """Makes the component's handler of a function. What it returns is kept as the message's result.

    An exception that is no answer is logged with its traceback, and the message is tried again.
    """

    class IncomingHandler(exports.IncomingHandler):
        def handle(self, message: Message) -> str | None:
            try:
                result = handle(message)
                return None if result is None else json.dumps(result)
            except Err:
                raise
            except Exception as error:
                log.log(log.Level.ERROR, traceback.format_exc())
                raise Err(types.Failure_Other(f"{type(error).__name__}: {error}")) from None

    return IncomingHandler


def _to_value(param: Any) -> sql.Value:
    # What is a variant of the contract already, such as `sql.Value_Uuid(text)`, passes as it is.
    match param:
        case None:
            return sql.Value_Null()
        case bool():
            return sql.Value_Boolean(param)
        case int():
            return sql.Value_Int8(param)
        case float():
            return sql.Value_Float8(param)
        case str():
            return sql.Value_Text(param)
        case bytes():
            return sql.Value_Bytea(param)
        case datetime():
            return sql.Value_Timestamptz((param - _EPOCH) // _MICROSECOND)
    return param


def _from_value(value: sql.Value) -> Any:
    match value:
        case sql.Value_Null():
            return None
        case sql.Value_Json(text):
            return json.loads(text)
        case sql.Value_Timestamptz(microseconds):
            return _EPOCH + microseconds * _MICROSECOND
    return value.value
