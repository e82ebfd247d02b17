"""Holds slots by the stored functions.

    functions.py DATABASE_URL ADDRESS SLOTS SERVICE...
"""

import random
import time

from client import ask, call, hold_again_and_again, pause, say


def hold(connection, address, slots, service):
    timeout = random.uniform(0.7, 1.3)
    asked_at = time.time()
    claim = ask(
        connection,
        "SELECT id, slot FROM resource_control.claim_service_request("
        "%s, %s, make_interval(secs => %s), 'by the functions')",
        (service, slots, timeout),
    )
    if claim is None:
        say("refused")
        pause(10)
        return
    token, slot = claim
    say("claimed", token, slot)
    call(address, service, slots, slot, token, asked_at + timeout, random.randint(1, 20))

    if random.random() < 0.1:
        asked_at = time.time()
        (renewed,) = ask(
            connection,
            "SELECT resource_control.renew_service_request(%s, make_interval(secs => %s))",
            (token, timeout),
        )
        if renewed is None:
            say("timed-out", token)
            return
        say("renewed", token)
        call(address, service, slots, slot, token, asked_at + timeout, random.randint(1, 20))

    match random.randrange(80):
        case 0:
            return  # forgotten
        case 1:
            time.sleep(max(0, asked_at + timeout - time.time()) + random.uniform(0, 0.3))  # late
    (completed,) = ask(connection, "SELECT resource_control.complete_service_request(%s)", (token,))
    say("released" if completed else "timed-out", token)


hold_again_and_again(hold)
