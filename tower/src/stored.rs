//! A response as the bytes that are stored: the status, the header fields and an empty line, each
//! ended by a line feed, and then the body. A header field contains no line feed.

use bytes::Bytes;
use http::response::Parts;
use http::{HeaderName, HeaderValue, Response, StatusCode};
use http_body_util::{Either, Full};

use crate::Body;

/// The status, those of the header fields that are to be stored, and the body.
pub(crate) fn write(response: &Parts, stored: &[HeaderName], body: &[u8]) -> Vec<u8> {
    let mut bytes = format!("{}\n", response.status.as_u16()).into_bytes();
    for (name, value) in &response.headers {
        if stored.contains(name) {
            bytes.extend_from_slice(name.as_str().as_bytes());
            bytes.extend_from_slice(b": ");
            bytes.extend_from_slice(value.as_bytes());
            bytes.push(b'\n');
        }
    }
    bytes.push(b'\n');
    bytes.extend_from_slice(body);
    bytes
}

/// The response. `None` if the bytes are not those of [`write`].
pub(crate) fn read<B>(stored: Vec<u8>) -> Option<Response<Body<B>>> {
    let mut rest = Bytes::from(stored);
    let mut line = || {
        let end = rest.iter().position(|byte| *byte == b'\n')?;
        let line = rest.split_to(end);
        Some((line, rest.split_to(1)).0)
    };
    let mut response = Response::new(());
    *response.status_mut() = StatusCode::from_bytes(&line()?).ok()?;
    loop {
        let line = line()?;
        if line.is_empty() {
            return Some(response.map(|()| Either::Right(Full::new(rest))));
        }
        let colon = line.windows(2).position(|bytes| bytes == b": ")?;
        let name = HeaderName::from_bytes(&line[..colon]).ok()?;
        let value = HeaderValue::from_bytes(&line[colon + 2..]).ok()?;
        response.headers_mut().append(name, value);
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    #[test]
    fn what_is_read_is_what_was_written() {
        let mut response = Response::new(());
        *response.status_mut() = StatusCode::CREATED;
        for (name, value) in [
            ("location", &b"/charges/7: \xfc"[..]),
            ("x-two", b"1"),
            ("x-two", b""),
            ("set-cookie", b"secret"),
        ] {
            let value = HeaderValue::from_bytes(value).unwrap();
            response.headers_mut().append(name, value);
        }
        let stored = ["location", "x-two"].map(HeaderName::from_static);
        let parts = response.into_parts().0;
        for body in [&b""[..], b"\n\n: \n", &[0, 255]] {
            let bytes = write(&parts, &stored, body);
            let (read, read_body) = read::<Full<Bytes>>(bytes).unwrap().into_parts();
            assert_eq!(read.status, StatusCode::CREATED);
            assert_eq!(read.headers["location"], parts.headers["location"]);
            let two: Vec<_> = read.headers.get_all("x-two").iter().collect();
            assert_eq!(two, ["1", ""]);
            assert_eq!(read.headers.len(), 3);
            let mut collected = std::pin::pin!(read_body.collect());
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            let std::task::Poll::Ready(Ok(read_body)) = collected.as_mut().poll(&mut context)
            else {
                panic!("the body is not ready");
            };
            assert_eq!(read_body.to_bytes(), body);
        }
    }

    #[test]
    fn other_bytes_are_no_response() {
        for bytes in [
            "",
            "done",
            "201",
            "201\n",
            "201\nlocation\n\n",
            "2x1\n\n",
            "201\n: 1\n\n",
        ] {
            assert!(read::<Full<Bytes>>(bytes.into()).is_none(), "{bytes:?}");
        }
    }
}
