"""Holds slots by the steps of the article "Implementing a semaphore with Django and Postgres" (Fusionbox), on the table of
this crate, which has a service and an expiry besides.

    article.py SETTINGS
"""

import random
import time

from client import call, hold_repeatedly, pause, send

COLUMNS = ("service", "slot", "created_at", "expires_at", "completed_at", "timed_out_at", "details")


def time_out(cursor, service):
    cursor.execute(
        "UPDATE resource_control.service_request SET timed_out_at = now() WHERE service = %s"
        " AND expires_at < now() AND completed_at IS NULL AND timed_out_at IS NULL",
        (service,),
    )


def claim(cursor, service, slots, timeout):
    """Returns the new row as a dictionary, or None."""
    time_out(cursor, service)
    cursor.execute("BEGIN")
    # We just need a lock level that conflicts with itself and the ROW EXCLUSIVE lock taken by the
    # insert.
    cursor.execute("LOCK TABLE resource_control.service_request IN SHARE ROW EXCLUSIVE MODE")
    cursor.execute(
        """
        INSERT INTO resource_control.service_request (service, created_at, expires_at, slot, details)
        SELECT %s, now(), now() + make_interval(secs => %s), coalesce(min(slot), 0), 'by the article'
        FROM generate_series(0, %s) slot
        WHERE NOT EXISTS (
            SELECT *
            FROM resource_control.service_request
            WHERE service_request.service = %s
             AND service_request.slot = slot.slot
             AND completed_at IS NULL
             AND timed_out_at IS NULL
        )
        ON CONFLICT DO NOTHING
        RETURNING id, service, slot, created_at, expires_at, completed_at, timed_out_at, details
        """,
        (service, timeout, slots - 1, service),
    )
    row = cursor.fetchone()
    if random.random() < 0.1:
        pause(20)
    cursor.execute("COMMIT")
    return row and dict(zip(("id", *COLUMNS), row))


def release(cursor, request):
    """Saves the row as an ORM saves an object: every column but one has the value that it was loaded with."""
    assignments = ", ".join(
        "completed_at = now()" if column == "completed_at" else f"{column} = %({column})s"
        for column in COLUMNS
    )
    cursor.execute(
        f"UPDATE resource_control.service_request SET {assignments} WHERE id = %(id)s", request
    )


def hold(connection, slots, service):
    timeout = random.uniform(0.7, 1.3)
    sent_at = time.time()
    with connection.cursor() as cursor:
        request = claim(cursor, service, slots, timeout)
        if request is None:
            send("refused")
            pause(40)
            return
        token, slot = request["id"], request["slot"]
        send("claimed", id=token, slot=slot)
        call(service, slot, token, sent_at + timeout)
        match random.randrange(40):
            case 0:
                return  # forgotten
            case 1:
                time.sleep(max(0, sent_at + timeout - time.time()) + random.uniform(0, 0.3))  # late
        release(cursor, request)


hold_repeatedly(hold)
