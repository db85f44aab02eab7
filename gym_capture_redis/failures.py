"""What is raised for a step that failed, whichever client sent it."""

from __future__ import annotations

from gym_capture_redis.errors import BackendUnavailableError, CaptureError, DurabilityError
from gym_capture_redis.faults import NotConfirmedError, NotSettledError, explain, final_error
from gym_capture_redis.settings import ServerSettings
from gym_capture_redis.subject import Subject


class Failures:
    """Puts into words what happened on the server of these settings, and to which rollout and call."""

    def __init__(self, settings: ServerSettings) -> None:
        self._timeout_s = settings.timeout_s
        self._durability, self._replicas = settings.durability, settings.replicas
        self._server = str(settings.url)

    def final(self, error: BaseException, subject: Subject, *, sent_before: bool) -> CaptureError:
        """For an exception that repeating does not cure; a copy, as one error may answer a whole batch.

        ``sent_before``: an earlier attempt, or what goes before the step, may have reached a server.
        """
        meant = final_error(error, self._server)
        earlier = "; an earlier attempt may have been applied, or a part of it" if sent_before else ""
        return type(meant)(
            f"{meant}{earlier} ({subject})",
            rollout_id=subject.rollout_id,
            model_call_id=subject.model_call_id,
        )

    def no_answer(
        self,
        subject: Subject,
        last: BaseException | None,
        cause: BaseException | None = None,
        *,
        sent: bool,
    ) -> CaptureError:
        """For a step that no server answered in time. ``last`` is what the newest attempt met.

        ``sent``: some of it may have reached a server, in any attempt.
        """
        return self.too_late(f"{self._server} gave no answer", subject, last, cause, sent=sent)

    def too_late(
        self,
        what: str,
        subject: Subject,
        last: BaseException | None,
        cause: BaseException | None = None,
        *,
        sent: bool,
    ) -> CaptureError:
        """For a call whose deadline has passed."""
        if isinstance(last, NotConfirmedError):
            error: CaptureError = DurabilityError(
                f"{self._server} applied the step on {subject}, but durability={self._durability!r} with "
                f"replicas={self._replicas} was not confirmed within {self._timeout_s:g} s; a failure of the "
                "server could still undo it. Repeating it is safe"
            )
        else:
            if sent:
                known = f"the step on {subject} may or may not have been applied, and repeating it is safe"
            else:
                known = f"the step on {subject} was not sent, nothing changed"
            if isinstance(last, NotSettledError):
                error = BackendUnavailableError(
                    f"{self._server} was started or promoted a moment ago, and workers may still be putting "
                    f"back what it forgot; {known}; try again in {last.left_s:.1f} s"
                )
            else:
                why = f" (last: {explain(last)})" if last is not None else ""
                error = BackendUnavailableError(f"{what} within {self._timeout_s:g} s{why}; {known}")
        error.rollout_id, error.model_call_id = subject.rollout_id, subject.model_call_id
        error.__cause__ = last or cause
        return error
