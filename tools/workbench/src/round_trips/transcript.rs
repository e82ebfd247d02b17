//! What a client asked, and which columns the server described.

use std::collections::HashMap;

/// A statement that a client has sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// The text, as it was sent.
    pub sql: String,
    /// The types of its parameters, by their oids. `None` if it was sent as a message of the simple protocol.
    pub parameters: Option<Vec<u32>>,
    /// The name and the oid of the type of each column of its last result.
    pub columns: Vec<(String, u32)>,
}

/// Finds the statements of a connection without encryption. Requests and replies belong together by their order: the server is
/// ready once after each request that a client waits for.
pub(super) fn exchanges(requests: &[u8], replies: &[u8]) -> Vec<Exchange> {
    // The opening has no type, and its length counts itself.
    let opening = requests
        .first_chunk()
        .map_or(0, |length| u32::from_be_bytes(*length));
    let mut prepared: HashMap<Vec<u8>, Exchange> = HashMap::new();
    let mut all = Vec::new();
    let requests = messages(requests.get(opening as usize..).unwrap_or_default());
    let replies = messages(replies);
    let requests = requests.split_inclusive(|(kind, _)| matches!(kind, b'Q' | b'S' | b'F'));
    let replies = replies.split_inclusive(|(kind, _)| *kind == b'Z').skip(1);
    for (asked, replied) in requests.zip(replies) {
        let described = replied.iter().rfind(|(kind, _)| *kind == b'T');
        let columns = described.map(|(_, body)| columns(body));
        let describe = |exchange: &mut Exchange| {
            if let Some(columns) = &columns {
                exchange.columns.clone_from(columns);
            }
        };
        for (kind, body) in asked {
            let mut body = Body(body);
            match kind {
                b'Q' => {
                    let mut exchange = Exchange {
                        sql: text(body.string()),
                        parameters: None,
                        columns: Vec::new(),
                    };
                    describe(&mut exchange);
                    all.push(exchange);
                }
                b'P' => {
                    let name = body.string().to_vec();
                    let sql = text(body.string());
                    let parameters = (0..body.short()).map(|_| body.long()).collect();
                    let mut exchange = Exchange {
                        sql,
                        parameters: Some(parameters),
                        columns: Vec::new(),
                    };
                    describe(&mut exchange);
                    prepared.insert(name, exchange);
                }
                b'B' => {
                    let _portal = body.string();
                    if let Some(exchange) = prepared.get_mut(body.string()) {
                        describe(exchange);
                        all.push(exchange.clone());
                    }
                }
                _ => {}
            }
        }
    }
    all
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The whole messages, with their types.
fn messages(mut bytes: &[u8]) -> Vec<(u8, &[u8])> {
    let mut all = Vec::new();
    while let [kind, a, b, c, d, rest @ ..] = bytes {
        let length = (u32::from_be_bytes([*a, *b, *c, *d]) as usize).saturating_sub(4);
        let Some((body, rest)) = rest.split_at_checked(length) else {
            break;
        };
        all.push((*kind, body));
        bytes = rest;
    }
    all
}

/// The names and types in a `RowDescription`.
fn columns(body: &[u8]) -> Vec<(String, u32)> {
    let mut body = Body(body);
    (0..body.short())
        .map(|_| {
            let name = text(body.string());
            // The table and the place in it; after the type its size, its modifier, and the format.
            let (_, _, kind) = (body.long(), body.short(), body.long());
            let _ = (body.short(), body.long(), body.short());
            (name, kind)
        })
        .collect()
}

/// What is left of a message.
struct Body<'a>(&'a [u8]);

impl<'a> Body<'a> {
    fn string(&mut self) -> &'a [u8] {
        let end = self.0.iter().position(|byte| *byte == 0);
        let (string, rest) = self.0.split_at(end.unwrap_or(self.0.len()));
        self.0 = rest.get(1..).unwrap_or_default();
        string
    }

    fn short(&mut self) -> u16 {
        u16::from_be_bytes(self.bytes())
    }

    fn long(&mut self) -> u32 {
        u32::from_be_bytes(self.bytes())
    }

    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let (bytes, rest) = self.0.split_first_chunk().expect("the message is whole");
        self.0 = rest;
        *bytes
    }
}
