"""Runs the Python of docs/interop.md, and everything that its table says is an error.

    page.py DATABASE_URL PAGE

Prints the lock key that the page's own code has locked.
"""

import asyncio
import datetime
import re
import sys

import asyncpg
import fnv
import psycopg
import psycopg2
import sqlalchemy
import sqlalchemy.orm
from psycopg.conninfo import conninfo_to_dict

url, page = sys.argv[1:]
with open(page, encoding="utf-8") as file:
    page = file.read()
blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
assert len(blocks) == 3, len(blocks)

# The code of the page.
name = "nightly report"
connection = psycopg.connect(url, autocommit=True)
cursor = connection.cursor()
space = {"fnv": fnv, "name": name, "cursor": cursor, "sqlalchemy": sqlalchemy}
exec(blocks[0], space)
assert space["granted"] is True
cursor.execute(
    "SELECT classid::bigint << 32 | objid::bigint FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'"
)
(locked,) = cursor.fetchone()

exec(blocks[2], space)
assert space["never_taken"] == ["tenant import"], space["never_taken"]

engine = sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(url))
engine2 = sqlalchemy.create_engine("postgresql+psycopg2://", creator=lambda: psycopg2.connect(url))
for one in engine, engine2:
    cursor.execute(
        "UPDATE resource_control.throttled_resource SET last_locked = '-infinity', last_locker_details = ''"
    )
    with sqlalchemy.orm.Session(one) as session:
        space["session"] = session
        exec(blocks[1], space)
        assert space["granted"] is True
        assert len(space["claims"]) == 1
cursor.execute("UPDATE resource_control.throttled_resource SET last_locked = '-infinity', last_locker_details = ''")

# What it says about errors.
unsigned = fnv.hash(b"a", algorithm=fnv.fnv_1a, bits=64)
assert unsigned >= 2**63


def psycopg2_(sql, *parameters):
    with psycopg2.connect(url) as connection, connection.cursor() as cursor:
        cursor.execute(sql.format(*["%s"] * len(parameters)), parameters)
        return cursor.fetchall()


def psycopg3(sql, *parameters):
    with psycopg.connect(url) as connection:
        return connection.execute(sql.format(*["%s"] * len(parameters)), parameters).fetchall()


def asyncpg_(sql, *parameters):
    where = conninfo_to_dict(url)

    async def run():
        connection = await asyncpg.connect(
            host=where["host"],
            port=where.get("port"),
            user=where["user"],
            password=where.get("password"),
            database=where["dbname"],
        )
        try:
            placeholders = [f"${i}" for i in range(1, len(parameters) + 1)]
            return await connection.fetch(sql.format(*placeholders), *parameters)
        finally:
            await connection.close()

    return asyncio.run(run())


def alchemy(call):
    with engine.begin() as connection:
        try:
            return connection.execute(sqlalchemy.select(call)).all()
        except sqlalchemy.exc.DBAPIError as error:
            raise error.orig


LOCK = "SELECT pg_try_advisory_lock({})"
CLAIM = "SELECT * FROM resource_control.claim_service_request({}, {}, {}, {})"
INFINITY = "SELECT last_locked FROM resource_control.throttled_resource"
resource_control = sqlalchemy.func.resource_control
ERRORS = [
    (lambda: psycopg2_(LOCK, unsigned), "UndefinedFunction", "function pg_try_advisory_lock(numeric) does not exist"),
    (lambda: psycopg3(LOCK, unsigned), "UndefinedFunction", "function pg_try_advisory_lock(numeric) does not exist"),
    (lambda: asyncpg_(LOCK, unsigned), "DataError", "value out of int64 range"),
    (lambda: alchemy(sqlalchemy.func.pg_try_advisory_lock(unsigned)), "NumericValueOutOfRange", "bigint out of range"),
    (lambda: psycopg2_(LOCK, name), "InvalidTextRepresentation", "invalid input syntax for type bigint"),
    (lambda: psycopg3(LOCK, name), "InvalidTextRepresentation", "invalid input syntax for type bigint"),
    (lambda: asyncpg_(LOCK, name), "DataError", "'str' object cannot be interpreted as an integer"),
    (lambda: asyncpg_(CLAIM, "s", 9, "30 seconds", "x"), "DataError", "'str' object has no attribute 'days'"),
    (
        lambda: alchemy(resource_control.lock_throttled_resource("tenant import", "x")),
        "UndefinedFunction",
        "function resource_control.lock_throttled_resource(character varying, character varying) does not exist",
    ),
    (lambda: psycopg3(INFINITY), "DataError", "timestamp too small (before year 1): '-infinity'"),
]
for call, kind, message in ERRORS:
    try:
        call()
    except Exception as error:
        assert type(error).__name__ == kind, (type(error), error)
        assert message in str(error), error
    else:
        raise AssertionError(f"no error: {message}")
    assert re.search(rf"`{kind}`: {re.escape(message)} \|", page), message

# And about what is none.
for fetch in psycopg2_, asyncpg_:
    assert fetch(INFINITY)[0][0].year == 1
for fetch in psycopg2_, psycopg3, asyncpg_:
    assert len(fetch(CLAIM, "delta", 9, datetime.timedelta(seconds=30), "x")) == 1
assert len(psycopg3(CLAIM, "text", 9, "30 seconds", "x")) == 1

# Django.
from django.conf import settings  # noqa: E402

where = conninfo_to_dict(url)
settings.configure(
    USE_TZ=True,
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "HOST": where["host"],
            "PORT": where.get("port", ""),
            "USER": where["user"],
            "PASSWORD": where.get("password", ""),
            "NAME": where["dbname"],
        }
    },
)
import django  # noqa: E402

django.setup()
from django.db import DataError, connections, models  # noqa: E402
from django.db.models import DateTimeField, F, Func  # noqa: E402


class Resource(models.Model):
    resource_id = models.TextField(primary_key=True)
    last_locked = models.DateTimeField()

    class Meta:
        app_label = "resources"
        managed = False
        db_table = 'resource_control"."throttled_resource'


try:
    list(Resource.objects.all())
    raise AssertionError("Django reads -infinity")
except DataError:
    pass
(nullif,) = re.findall(r"`(Func\(F\(.*?\))`\.", page)
assert [row.taken for row in Resource.objects.defer("last_locked").annotate(taken=eval(nullif))] == [None]
(clock,) = re.findall(r"`(Func\(function=.*?\))` there\.", page)
assert Resource.objects.values_list(eval(clock)).get()[0].year > 2000
connections.close_all()

print(locked)
