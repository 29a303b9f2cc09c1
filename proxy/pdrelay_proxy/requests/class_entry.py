"""How a request comes to the gate where there are classes, and what became of its targets when it is over."""

from pdrelay_proxy.core.admission.service_classes import ServiceClasses
from pdrelay_proxy.core.admission.service_levels import ClassEntry
from pdrelay_proxy.core.admission.ticket import Ticket, TicketState
from pdrelay_proxy.core.class_record import ClassOutcome, ClassRecord
from pdrelay_proxy.core.request_record import CLIENT_CLOSED_REQUEST, RequestRecord
from pdrelay_proxy.requests.intake import RequestHead, RequestPlan
from pdrelay_proxy.requests.life import RequestLife
from pdrelay_proxy.requests.prompt_array import bytes_of, may_divide


def arrive_in_class(
    life: RequestLife, classes: ServiceClasses, head: RequestHead, plan: RequestPlan, size: int
) -> Ticket:
    """Return the ticket of a request, with its class.

    Raises:
        BadRequest, ClassNotAllowed: it names a class that its client may not use.
    """
    of, record = life.of, life.record
    service_class = of.intake.class_of(head, classes)
    outlook = of.fleet.outlook()
    own = None
    if outlook is not None and plan.call is not None:
        own = of.fleet.own_times(plan.ask, outlook, of.settings.min_split_new_bytes)
    expected_s = None if own is None or outlook is None else outlook.queue_s + own.ttft_s
    record.of_class = ClassRecord(service_class.name, service_class.ttft_s, service_class.itl_s, expected_s)
    is_divided = plan.prompts and plan.call is not None and may_divide(of.fleet, plan.call, plan)
    share = bytes_of(plan.prompts[:1]) / bytes_of(plan.prompts) if is_divided else 1.0
    entry = ClassEntry(service_class, own, outlook, share)
    return of.gate.arrive_in_class(head.caller, plan.priority, size, plan.tokens, entry, prompts=len(plan.prompts) or 1)


def judge(record: RequestRecord, status: int, ticket: Ticket, events: int) -> None:
    """Note what became of a request's targets that is over with this status; ``events``: of its stream."""
    of_class = record.of_class
    if of_class is None:
        return
    if status == CLIENT_CLOSED_REQUEST:
        of_class.outcome = ClassOutcome.DISCONNECTED
    elif ticket.refusal is not None:
        is_over = ticket.state is TicketState.EXPIRED
        of_class.outcome = ClassOutcome.EXPIRED if is_over else ClassOutcome.REFUSED
    elif status >= 400 or record.error is not None:
        of_class.outcome = ClassOutcome.FAILED
    else:
        first_s = record.ttft_s
        itl_s = None if first_s is None or events < 2 else (record.duration_s - first_s) / (events - 1)
        of_class.served(None if first_s is None else first_s - (record.received_s or 0.0), itl_s)
