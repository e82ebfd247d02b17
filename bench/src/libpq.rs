//! libpq as it is, without anything in between: what every client of PostgreSQL in this measurement is compared with.
//!
//! Every failure is a panic with the server's message.

// The one way to call libpq.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr;

use pq_sys::{ConnStatusType, ExecStatusType, PGconn, PGresult};

/// One connection.
pub(crate) struct Session {
    conn: *mut PGconn,
}

// SAFETY: libpq lets a connection be used by any thread, one at a time; every method borrows it exclusively.
unsafe impl Send for Session {}

/// A statement that the session has prepared.
pub(crate) struct Prepared {
    name: CString,
}

/// The reply of the server to a statement.
pub(crate) struct Reply {
    result: *mut PGresult,
}

impl Session {
    pub(crate) fn connect(url: &str) -> Self {
        let url = CString::new(url).expect("no NUL in a connection string");
        // SAFETY: the string outlives the call, and the result is checked below.
        let conn = unsafe { pq_sys::PQconnectdb(url.as_ptr()) };
        let session = Self { conn };
        // SAFETY: libpq takes a null pointer here, and returns a bad status.
        let status = unsafe { pq_sys::PQstatus(conn) };
        assert!(
            status == ConnStatusType::CONNECTION_OK,
            "cannot connect: {}",
            session.message()
        );
        session
    }

    pub(crate) fn prepare(&mut self, name: &str, statement: &str) -> Prepared {
        let name = CString::new(name).expect("no NUL in a name");
        let statement = CString::new(statement).expect("no NUL in a statement");
        // SAFETY: the connection is open and borrowed exclusively; the strings outlive the call; without types there is
        // nothing behind the null pointer.
        let result = unsafe {
            pq_sys::PQprepare(self.conn, name.as_ptr(), statement.as_ptr(), 0, ptr::null())
        };
        self.checked(result);
        Prepared { name }
    }

    /// Runs a prepared statement, with parameters and reply in binary form, as Diesel does.
    pub(crate) fn run(&mut self, statement: &Prepared, parameters: &[i64]) -> Reply {
        const MOST: usize = 8;
        assert!(parameters.len() <= MOST);
        let mut numbers = [[0; 8]; MOST];
        let mut values: [*const c_char; MOST] = [ptr::null(); MOST];
        let mut lengths: [c_int; MOST] = [0; MOST];
        for (at, parameter) in parameters.iter().enumerate() {
            numbers[at] = parameter.to_be_bytes();
            values[at] = numbers[at].as_ptr().cast();
            lengths[at] = numbers[at].len() as c_int;
        }
        // In binary form, where the length is what counts.
        let formats: [c_int; MOST] = [1; MOST];
        // SAFETY: the connection is open and borrowed exclusively; as many values, lengths and formats are there as the
        // call is told of, each with as many bytes as its length says, and all of them outlive the call.
        let result = unsafe {
            pq_sys::PQexecPrepared(
                self.conn,
                statement.name.as_ptr(),
                parameters.len() as c_int,
                values.as_ptr(),
                lengths.as_ptr(),
                formats.as_ptr(),
                1,
            )
        };
        self.checked(result)
    }

    /// Runs statements as text, in one round trip of the simple protocol, with the last reply as text.
    pub(crate) fn query(&mut self, statements: &str) -> Reply {
        let statements = CString::new(statements).expect("no NUL in a statement");
        self.query_c(&statements)
    }

    /// As [`query`](Self::query), of a statement that is at hand in C's form.
    pub(crate) fn query_c(&mut self, statements: &CStr) -> Reply {
        // SAFETY: the connection is open and borrowed exclusively; the string outlives the call.
        let result = unsafe { pq_sys::PQexec(self.conn, statements.as_ptr()) };
        self.checked(result)
    }

    fn checked(&self, result: *mut PGresult) -> Reply {
        let reply = Reply { result };
        // SAFETY: libpq takes a null pointer here, and returns a fatal error.
        let status = unsafe { pq_sys::PQresultStatus(result) };
        assert!(
            matches!(
                status,
                ExecStatusType::PGRES_COMMAND_OK | ExecStatusType::PGRES_TUPLES_OK
            ),
            "a statement failed: {}",
            self.message()
        );
        reply
    }

    fn message(&self) -> String {
        // SAFETY: libpq takes a null pointer here; the string is the connection's and is copied at once.
        let message = unsafe { CStr::from_ptr(pq_sys::PQerrorMessage(self.conn)) };
        message.to_string_lossy().trim().to_owned()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: the connection is closed once, here, and not used afterwards.
        unsafe { pq_sys::PQfinish(self.conn) };
    }
}

impl Reply {
    pub(crate) fn rows(&self) -> usize {
        // SAFETY: the result was checked when it was made, and is freed in `drop` only.
        unsafe { pq_sys::PQntuples(self.result) as usize }
    }

    /// How many rows the statement changed.
    pub(crate) fn changed(&self) -> u64 {
        // SAFETY: as above; the string is the result's, which outlives its use here.
        let text = unsafe { CStr::from_ptr(pq_sys::PQcmdTuples(self.result)) };
        text.to_str()
            .ok()
            .and_then(|text| text.parse().ok())
            .unwrap_or(0)
    }

    /// The bytes of a column of the first row, none if it is null.
    pub(crate) fn bytes(&self, column: usize) -> Option<&[u8]> {
        assert!(self.rows() > 0, "the reply has no row");
        let column = column as c_int;
        // SAFETY: there is a first row, as was just checked; of a column that is not there libpq says null; a value has
        // as many bytes as libpq says, which live as long as the result does.
        unsafe {
            if pq_sys::PQgetisnull(self.result, 0, column) != 0 {
                return None;
            }
            let length = pq_sys::PQgetlength(self.result, 0, column) as usize;
            let value = pq_sys::PQgetvalue(self.result, 0, column);
            Some(std::slice::from_raw_parts(value.cast(), length))
        }
    }

    /// A boolean of the first row, from either form.
    pub(crate) fn is_true(&self, column: usize) -> bool {
        matches!(self.bytes(column), Some([1] | [b't']))
    }

    /// A `bigint` of the first row, in binary form.
    pub(crate) fn bigint(&self, column: usize) -> i64 {
        let bytes = self.bytes(column).expect("a bigint that is not null");
        i64::from_be_bytes(bytes.try_into().expect("a bigint has eight bytes"))
    }

    /// The first row's column as text.
    pub(crate) fn text(&self, column: usize) -> String {
        String::from_utf8_lossy(self.bytes(column).unwrap_or_default()).into_owned()
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        // SAFETY: the result is freed once, here; libpq takes a null pointer.
        unsafe { pq_sys::PQclear(self.result) };
    }
}
