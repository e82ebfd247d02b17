//! What does not depend on the framework is the same in both web applications.

use std::fs;
use std::path::Path;

#[test]
fn what_knows_nothing_of_the_framework_is_the_same_in_both_applications() {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let read = |app: &str, file: &str| {
        let path = examples.join(app).join(file);
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    for file in [
        "diesel.toml",
        "migrations/2026-01-01-000000_datacenters/up.sql",
        "migrations/2026-01-01-000000_datacenters/down.sql",
        "src/admin.rs",
        "src/cache.rs",
        "src/chaos.rs",
        "src/config.rs",
        "src/database.rs",
        "src/geocoder.rs",
        "src/reports.rs",
        "src/reservations.rs",
        "src/schema.rs",
        "templates/locks.html",
    ] {
        assert!(
            read("axum_app", file) == read("actix_app", file),
            "{file} differs"
        );
    }
}
