"""What the Python clients of the hammer share."""

import random
import socket
import sys
import threading
import time

import psycopg2
from psycopg2 import errors


def say(*words):
    """Says a line to the process that started this one, in one piece."""
    print(*words, flush=True)


def until_the_input_ends():
    """An event that is set by the end of the standard input."""
    over = threading.Event()

    def wait():
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    return over


def connect(url):
    connection = psycopg2.connect(url)
    connection.autocommit = True
    return connection


def ask(connection, statement, parameters=()):
    """The first row of the answer, or None. A serialization failure, as of a stricter isolation
    level, is repeated in a READ COMMITTED transaction, as the functions' comments say."""
    with connection.cursor() as cursor:
        try:
            cursor.execute(statement, parameters)
            return cursor.fetchone()
        except errors.SerializationFailure:
            cursor.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
            try:
                cursor.execute(statement, parameters)
                row = cursor.fetchone()
                cursor.execute("COMMIT")
                return row
            finally:
                if not connection.closed:
                    cursor.execute("ROLLBACK")


def call(address, service, slots, slot, token, deadline, work):
    """Calls the fragile service, and waits until it has done its work, of so many milliseconds."""
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as caller:
        line = f"{slots} {slot} {token} {int(deadline * 1e6)} {work} {service}\n"
        caller.sendall(line.encode())
        caller.makefile().readline()


def hold_again_and_again(hold):
    """Runs a function that claims a slot and gives it back, with a connection, an address, the
    number of slots and a service, until the input ends; connects anew when a session is lost."""
    url, address, slots, *services = sys.argv[1:]
    over = until_the_input_ends()
    connection = connect(url)
    while not over.is_set():
        try:
            hold(connection, address, int(slots), random.choice(services))
        except (psycopg2.OperationalError, psycopg2.InterfaceError) as error:
            if not connection.closed:
                raise
            say("failed", *str(error).split())
            connection = connect(url)


def pause(milliseconds):
    time.sleep(random.uniform(0, milliseconds) / 1000)
