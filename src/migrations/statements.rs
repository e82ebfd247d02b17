//! The single statements of a migration.

/// Splits a script at the semicolons that end its statements, without the comments before each.
///
/// Knows what our own migrations are written in: line comments, `'…'`, `"…"` and `$tag$…$tag$`.
pub(super) fn statements(script: &str) -> Vec<&str> {
    let mut statements = Vec::new();
    let mut rest = without_comments(script);
    while !rest.is_empty() {
        let end = end_of_statement(rest);
        statements.push(rest[..end].trim_end());
        rest = without_comments(rest[end..].strip_prefix(';').unwrap_or(""));
    }
    statements
}

/// What follows the white space and the comments.
fn without_comments(mut script: &str) -> &str {
    loop {
        script = script.trim_start();
        if !script.starts_with("--") {
            return script;
        }
        script = script.split_once('\n').map_or("", |(_, rest)| rest);
    }
}

/// Where the semicolon is that ends the first statement, or the end of the script.
fn end_of_statement(script: &str) -> usize {
    let mut at = 0;
    while let Some(next) = script[at..].find(['\'', '"', '$', '-', ';']) {
        at += next;
        let rest = &script[at..];
        at += match rest.as_bytes()[0] {
            b';' => return at,
            b'-' if rest.starts_with("--") => rest.find('\n').unwrap_or(rest.len()),
            b'-' => 1,
            b'$' => match rest[1..].find('$') {
                Some(tag) if is_tag(&rest[1..=tag]) => through(rest, &rest[..tag + 2]),
                _ => 1,
            },
            _ => through(rest, &rest[..1]),
        };
    }
    script.len()
}

fn is_tag(tag: &str) -> bool {
    tag.chars()
        .all(|char| char.is_alphanumeric() || char == '_')
}

/// How long the quoted text is, with the quote at both its ends.
fn through(rest: &str, quote: &str) -> usize {
    let inside = &rest[quote.len()..];
    inside
        .find(quote)
        .map_or(rest.len(), |end| end + 2 * quote.len())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::ours::OURS;
    use super::statements;

    #[test]
    fn a_semicolon_ends_a_statement_unless_it_is_quoted_or_in_a_comment() {
        let script = "-- one; two\n SELECT 1 ; \n\nSELECT ';', ';''', \";\" -- ;\n , 2;\n\
                      SELECT $$;$$ - $a$; $$ $b$; $a$ ;-- end; \n";
        assert_eq!(
            statements(script),
            [
                "SELECT 1",
                "SELECT ';', ';''', \";\" -- ;\n , 2",
                "SELECT $$;$$ - $a$; $$ $b$; $a$"
            ]
        );
        assert_eq!(statements(" SELECT 1"), ["SELECT 1"]);
        assert_eq!(statements("SELECT 'open; "), ["SELECT 'open;"]);
        assert_eq!(statements("SELECT $1; --"), ["SELECT $1"]);
        assert_eq!(statements("SELECT $1 - $2; END"), ["SELECT $1 - $2", "END"]);
        assert_eq!(statements("DO $a_1$ ; $a_1$"), ["DO $a_1$ ; $a_1$"]);
        assert!(statements(" \n-- nothing").is_empty());
    }

    #[test]
    fn our_migrations_consist_of_statements_of_a_few_kinds() {
        for statement in OURS.iter().flat_map(|ours| statements(ours.up)) {
            let known = ["CREATE ", "COMMENT ", "INSERT INTO ", "ALTER "];
            assert!(
                known.iter().any(|known| statement.starts_with(known)),
                "{statement}"
            );
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_text_splits_and_nothing_of_a_statement_is_lost(
            script in "([a-zß ;'\"$\n-]|\\$[a-z_1;]?\\$|--|\\PC){0,40}"
        ) {
            let mut end = 0;
            for statement in statements(&script) {
                prop_assert_eq!(statement, statement.trim());
                let at = statement.as_ptr() as usize - script.as_ptr() as usize;
                // What is between two of them is white space, a semicolon and comments.
                let between = script[end..at].lines().map(|line| line.split("--").next().unwrap());
                prop_assert!(between.flat_map(str::chars).all(|char| char == ';' || char.is_whitespace()));
                end = at + statement.len();
            }
        }

        #[test]
        fn quoted_semicolons_end_nothing(
            pieces in proptest::collection::vec("[a-z0-9 =(),]{1,8}|'[a-z;$\"-]{0,5}'|\"[a-z;$'-]{0,5}\"|\\$t\\$[a-z;'\"-]{0,5}\\$t\\$|-- [a-z;']{0,5}\n", 1..9),
            others in 1..4_usize,
        ) {
            let one = format!("SELECT {}", pieces.join(" "));
            let script = vec![one.as_str(); others].join(";\n");
            prop_assert_eq!(statements(&script), vec![one.trim_end(); others]);
        }
    }
}
