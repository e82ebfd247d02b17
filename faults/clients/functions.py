"""Holds slots through the stored functions.

    functions.py SETTINGS
"""

import random
import time

from client import call, hold_repeatedly, pause, query, send


def hold(connection, slots, service):
    timeout = random.uniform(0.7, 1.3)
    sent_at = time.time()
    claim = query(
        connection,
        "SELECT id, slot FROM resource_control.claim_service_request("
        "%s, %s, make_interval(secs => %s), 'by the functions')",
        (service, slots, timeout),
    )
    if claim is None:
        send("refused")
        pause(10)
        return
    token, slot = claim
    send("claimed", id=token, slot=slot)
    call(service, slot, token, sent_at + timeout)

    if random.random() < 0.1:
        sent_at = time.time()
        (renewed,) = query(
            connection,
            "SELECT resource_control.renew_service_request(%s, make_interval(secs => %s))",
            (token, timeout),
        )
        if renewed is None:
            send("timed_out", id=token)
            return
        send("renewed", id=token)
        call(service, slot, token, sent_at + timeout)

    match random.randrange(80):
        case 0:
            return  # forgotten
        case 1:
            time.sleep(max(0, sent_at + timeout - time.time()) + random.uniform(0, 0.3))  # late
    (completed,) = query(connection, "SELECT resource_control.complete_service_request(%s)", (token,))
    send("released" if completed else "timed_out", id=token)


hold_repeatedly(hold)
