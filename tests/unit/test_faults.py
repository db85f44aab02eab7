"""What each exception of redis-py means: try again, or one of our errors in clear words."""

from __future__ import annotations

import ssl

import pytest
from redis import exceptions as redis_errors

from gym_capture_redis.errors import (
    BackendUnavailableError,
    CaptureError,
    ConfigurationError,
    CorruptRecordError,
    DurabilityError,
    UnsupportedFormatError,
)
from gym_capture_redis.faults import explain, final_error, is_transient, is_unknown_script

SERVER = "redis://server:6379/0"
TOKENS = "987654321 987654322"

TRANSIENT = [
    redis_errors.ConnectionError("Connection closed by server."),
    redis_errors.TimeoutError("Timeout reading"),
    redis_errors.BusyLoadingError("LOADING Redis is loading the dataset in memory"),
    redis_errors.ReadOnlyError("READONLY You can't write against a read only replica."),
    redis_errors.ClusterError("TTL exhausted."),
    redis_errors.TryAgainError("TRYAGAIN Multiple keys request during rehashing of slot"),
    redis_errors.AskError("1 127.0.0.1:7000"),
    redis_errors.MovedError("1 127.0.0.1:7000"),
    redis_errors.ClusterDownError("CLUSTERDOWN The cluster is down"),
    redis_errors.MasterDownError("MASTERDOWN Link with MASTER is down"),
    redis_errors.MaxConnectionsError("Too many connections"),
    redis_errors.InvalidResponse("Protocol Error"),
    redis_errors.ResponseError("BUSY Redis is busy running a script"),
    redis_errors.ResponseError("NOREPLICAS Not enough good replicas to write."),
    redis_errors.ResponseError("MISCONF Errors writing to the AOF file"),
    redis_errors.ResponseError("READONLY You can't write against a read only replica."),
    redis_errors.ResponseError("LOADING Redis is loading the dataset in memory"),
    ConnectionResetError("Connection reset by peer"),
    BrokenPipeError("Broken pipe"),
    OSError("Network is unreachable"),
]

FINAL = [
    (
        redis_errors.AuthenticationError("invalid username-password pair"),
        ConfigurationError,
        "refused the user or password",
    ),
    (
        redis_errors.AuthenticationError("Authentication required."),
        ConfigurationError,
        "refused the user or password",
    ),
    (redis_errors.AuthorizationError("no"), ConfigurationError, "refused the user or password"),
    (
        redis_errors.AuthenticationWrongNumberOfArgsError("no"),
        ConfigurationError,
        "refused the user or password",
    ),
    (
        redis_errors.NoPermissionError("User x has no permissions to run the 'evalsha' command"),
        ConfigurationError,
        "does not permit",
    ),
    (
        redis_errors.ResponseError("NOPERM this user has no permissions"),
        ConfigurationError,
        "does not permit",
    ),
    (
        redis_errors.ResponseError(f"unknown command 'EVALSHA', with args beginning with: {TOKENS}"),
        ConfigurationError,
        "runs no Lua scripts",
    ),
    (
        redis_errors.ResponseError(f"ERR unknown command `EVAL`, with args beginning with: {TOKENS}"),
        ConfigurationError,
        "runs no Lua scripts",
    ),
    (
        redis_errors.ResponseError("ACL failure in script: User w has no permissions to run 'hset'"),
        ConfigurationError,
        "does not permit",
    ),
    (
        redis_errors.ResponseError("The user executing the script can't run this command or subcommand"),
        ConfigurationError,
        "does not permit",
    ),
    (
        redis_errors.ResponseError("DB index is out of range"),
        ConfigurationError,
        "no database of this number",
    ),
    (
        redis_errors.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
        BackendUnavailableError,
        "out of memory.*nothing was stored",
    ),
    (redis_errors.ResponseError("OOM command not allowed"), BackendUnavailableError, "out of memory"),
    (
        redis_errors.ResponseError("WRONGTYPE Operation against a key"),
        CorruptRecordError,
        "holds a value that is no hash",
    ),
    (
        redis_errors.ResponseError("CORRUPT the state of the rollout lacks 2 fields"),
        CorruptRecordError,
        "damaged rollout: the state of the rollout lacks 2 fields",
    ),
    (redis_errors.ResponseError("NEWER 2"), UnsupportedFormatError, "upgrade"),
    (redis_errors.ResponseError(f"ERR something {TOKENS}"), BackendUnavailableError, "refused the step"),
    (redis_errors.ResponseError(), BackendUnavailableError, "refused the step"),
    (
        redis_errors.DataError(f"Invalid input of type: 'bool' {TOKENS}"),
        BackendUnavailableError,
        "refused the step",
    ),
    (ValueError(TOKENS), BackendUnavailableError, "refused the step"),
]


@pytest.mark.parametrize("error", TRANSIENT, ids=repr)
def test_a_server_that_is_away_or_moving_is_asked_again(error: Exception) -> None:
    assert is_transient(error)


@pytest.mark.parametrize(("error", "_class", "_message"), FINAL, ids=lambda value: repr(value)[:60])
def test_what_repeating_does_not_cure_is_not_repeated(
    error: Exception, _class: type[CaptureError], _message: str
) -> None:
    assert not is_transient(error)


@pytest.mark.parametrize(("error", "error_class", "message"), FINAL, ids=lambda value: repr(value)[:60])
def test_each_refusal_has_its_own_class_and_words_that_name_the_server(
    error: Exception, error_class: type[CaptureError], message: str
) -> None:
    ours = final_error(error, SERVER)
    assert type(ours) is error_class
    assert str(ours).startswith(SERVER)
    with pytest.raises(error_class, match=message):
        raise ours


@pytest.mark.parametrize(("error", "_class", "_message"), FINAL, ids=lambda value: repr(value)[:60])
def test_no_message_quotes_what_the_server_quoted(
    error: Exception, _class: type[CaptureError], _message: str
) -> None:
    assert "98765432" not in str(final_error(error, SERVER))


@pytest.mark.parametrize(
    "said",
    [
        "NOPERM User w has no permissions to run the 'evalsha' command",
        "ACL failure in script: User w has no permissions to run the 'hset' command",
        "The user executing the script can't run this command or subcommand",
    ],
)
def test_a_missing_permission_is_told_in_the_words_of_the_server_but_not_at_any_length(said: str) -> None:
    for error in (redis_errors.ResponseError(said), redis_errors.NoPermissionError(said)):
        assert f"({said})" in str(final_error(error, SERVER))
    assert len(str(final_error(redis_errors.ResponseError(said + 10_000 * "x"), SERVER))) < 500


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (redis_errors.ConnectionError("Error 111 connecting: Connection refused."), "Connection refused"),
        (FileNotFoundError("No such file or directory"), "No such file or directory"),
        (redis_errors.BusyLoadingError("it is loading its data"), "loading its data"),
        (redis_errors.ResponseError(f"MISCONF {TOKENS}"), "MISCONF"),
        (redis_errors.TimeoutError(), "TimeoutError"),
    ],
)
def test_why_a_step_is_tried_again_is_told_without_quoting_replies(error: Exception, shown: str) -> None:
    assert shown in explain(error)
    assert "98765432" not in explain(error)


@pytest.mark.parametrize(
    "error", [DurabilityError("weak"), ConfigurationError("wrong"), CorruptRecordError("bad")]
)
def test_our_own_errors_pass_unchanged_and_are_not_repeated(error: CaptureError) -> None:
    assert final_error(error, SERVER) is error
    assert not is_transient(error)


def test_only_a_missing_script_is_sent_by_source() -> None:
    assert is_unknown_script(redis_errors.NoScriptError("No matching script. Please use EVAL."))
    assert not is_unknown_script(redis_errors.ResponseError("ERR something"))
    assert not is_transient(redis_errors.NoScriptError("No matching script. Please use EVAL."))


@pytest.mark.parametrize("met", [ssl.SSLError(1, "tlsv1 alert"), ssl.SSLEOFError(8, "EOF"), OSError("away")])
def test_only_a_certificate_that_is_refused_ends_the_tries_to_connect_over_tls(met: OSError) -> None:
    untrusted = ssl.SSLCertVerificationError(1, "certificate verify failed")
    untrusted.verify_message = "self-signed certificate"
    assert is_transient(met_while_connecting(met))
    assert not is_transient(met_while_connecting(untrusted))
    meant = final_error(met_while_connecting(untrusted), SERVER)
    assert type(meant) is ConfigurationError
    assert str(meant).endswith("(self-signed certificate)")


def met_while_connecting(met: OSError) -> Exception:
    """As redis-py hands on what a connection met."""
    error = redis_errors.ConnectionError(str(met))
    error.__context__ = met
    return error


def wrapped(cause: Exception) -> Exception:
    """As redis-py's unix connection hands on what it met while greeting the server."""
    error = redis_errors.ConnectionError(cause)
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(("error", "error_class", "message"), FINAL, ids=lambda value: repr(value)[:60])
def test_what_a_unix_connection_wraps_means_the_same(
    error: Exception, error_class: type[CaptureError], message: str
) -> None:
    if isinstance(error, redis_errors.RedisError):
        assert not is_transient(wrapped(error))
        with pytest.raises(error_class, match=message):
            raise final_error(wrapped(error), SERVER)


@pytest.mark.parametrize("error", TRANSIENT, ids=repr)
def test_a_wrapped_error_of_a_server_that_is_away_is_asked_again_too(error: Exception) -> None:
    assert is_transient(wrapped(error))


def test_a_script_that_an_operator_stopped_is_tried_again() -> None:
    said = "Script killed by user with SCRIPT KILL. script: 1a, on @user_script:1."
    assert is_transient(redis_errors.ResponseError(said))
