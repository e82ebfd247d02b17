//! Throttled resources, which keep their intervals in the database.

use std::fmt;
use std::io::Write as _;
use std::time::Duration;

use diesel::deserialize::{self, FromSql, FromSqlRow};
use diesel::expression::AsExpression;
use diesel::pg::{Pg, PgValue};
use diesel::serialize::{self, IsNull, Output, ToSql};

use crate::schema::resource_control::sql_types::ThrottledResourceEnum;

/// A resource with a label of the enumerated type `resource_control.throttled_resource_enum`.
///
/// [`throttled_resources!`](crate::throttled_resources) implements this trait for the enum that it
/// declares. Implement it yourself for an enum of your own, for example one that is mapped by the
/// crate `diesel-derive-enum`.
///
/// ```compile_fail,E0277
/// // A name is no resource: `Throttle::named` takes it, with an interval.
/// let throttle: diesel_interlock::Throttle = diesel_interlock::Throttle::of("rebuild the cache");
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a throttled resource",
    label = "not a resource that `throttled_resources!` declares",
    note = "declare it: `throttled_resources! {{ enum Resource {{ CacheRebuild = \"cache \
         rebuild\" every Duration::from_secs(15) }} }}`",
    note = "or use a throttle by its name, which needs no resource: `Throttle::named(\"cache \
         rebuild\", Duration::from_secs(15))`"
)]
pub trait ThrottledResource {
    /// Returns the label of the resource, as it is in the database.
    fn label(&self) -> &'static str;
}

/// Resources that a program declares together with their intervals.
/// [`Throttle::sync`](crate::throttle::Throttle::sync) inserts them into the database.
pub trait DeclaredResources: ThrottledResource + Sized + 'static {
    /// All declared resources.
    const ALL: &'static [Self];

    /// Returns the minimum time between two grants.
    fn interval(&self) -> Duration;
}

/// The label of a resource, for queries. A label that the database does not have is an error there.
#[derive(Debug, Clone, PartialEq, Eq, Hash, AsExpression, FromSqlRow)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[diesel(sql_type = ThrottledResourceEnum)]
pub struct ResourceLabel(pub String);

impl fmt::Display for ResourceLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl ToSql<ThrottledResourceEnum, Pg> for ResourceLabel {
    fn to_sql<'b>(&'b self, out: &mut Output<'b, '_, Pg>) -> serialize::Result {
        out.write_all(self.0.as_bytes())?;
        Ok(IsNull::No)
    }
}

impl FromSql<ThrottledResourceEnum, Pg> for ResourceLabel {
    fn from_sql(value: PgValue<'_>) -> deserialize::Result<Self> {
        Ok(Self(std::str::from_utf8(value.as_bytes())?.to_owned()))
    }
}

/// Declares an enum of throttled resources, each with its label in the database and its interval.
///
/// The enum is `Copy`, implements [`ThrottledResource`](crate::ThrottledResource) and
/// [`DeclaredResources`](crate::DeclaredResources), and maps to the PostgreSQL type
/// `resource_control.throttled_resource_enum` in Diesel queries.
///
/// ```
/// use std::time::Duration;
///
/// use diesel_interlock::{Error, PgPool, Throttle, throttled_resources};
///
/// throttled_resources! {
///     /// What this application does at most once per interval.
///     pub enum Resource {
///         CacheRebuild = "cache rebuild" every Duration::from_secs(15),
///         TenantImport = "tenant import" every Duration::from_secs(60),
///     }
/// }
///
/// fn start_up(pool: &PgPool) -> Result<(), Error> {
///     for difference in Throttle::sync::<Resource>(pool)?.different {
///         eprintln!("the interval of the database applies: {difference:?}");
///     }
///     Ok(())
/// }
///
/// fn import(pool: &PgPool, tenant: i64) -> Result<bool, Error> {
///     Ok(Throttle::of(Resource::TenantImport).key(tenant).attempt(pool)?.is_granted())
/// }
/// # let database = workbench::Database::new();
/// # let pool = database.pool(1);
/// # diesel_interlock::migrations::install(&pool)?;
/// # start_up(&pool)?;
/// # assert!(import(&pool, 7)? && import(&pool, 8)? && !import(&pool, 7)?);
/// # Ok::<(), Error>(())
/// ```
#[macro_export]
macro_rules! throttled_resources {
    (
        $(#[$meta:meta])*
        $visibility:vis enum $name:ident {
            $(
                $(#[$variant_meta:meta])*
                $variant:ident = $label:literal every $interval:expr
            ),+ $(,)?
        }
    ) => {
        $(#[$meta])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, Hash,
            ::diesel::expression::AsExpression, ::diesel::deserialize::FromSqlRow,
        )]
        #[diesel(sql_type = $crate::schema::resource_control::sql_types::ThrottledResourceEnum)]
        $visibility enum $name {
            $(
                $(#[$variant_meta])*
                #[doc = concat!("The label `", $label, "`.")]
                $variant,
            )+
        }

        impl $crate::ThrottledResource for $name {
            fn label(&self) -> &'static str {
                match self {
                    $( Self::$variant => $label, )+
                }
            }
        }

        impl $crate::DeclaredResources for $name {
            const ALL: &'static [Self] = &[ $( Self::$variant, )+ ];

            fn interval(&self) -> ::std::time::Duration {
                match self {
                    $( Self::$variant => $interval, )+
                }
            }
        }

        impl ::diesel::serialize::ToSql<
            $crate::schema::resource_control::sql_types::ThrottledResourceEnum,
            ::diesel::pg::Pg,
        > for $name {
            fn to_sql<'b>(
                &'b self,
                out: &mut ::diesel::serialize::Output<'b, '_, ::diesel::pg::Pg>,
            ) -> ::diesel::serialize::Result {
                use ::std::io::Write as _;
                out.write_all($crate::ThrottledResource::label(self).as_bytes())?;
                Ok(::diesel::serialize::IsNull::No)
            }
        }

        impl ::diesel::deserialize::FromSql<
            $crate::schema::resource_control::sql_types::ThrottledResourceEnum,
            ::diesel::pg::Pg,
        > for $name {
            fn from_sql(
                value: ::diesel::pg::PgValue<'_>,
            ) -> ::diesel::deserialize::Result<Self> {
                let label = ::std::str::from_utf8(value.as_bytes())?;
                <Self as $crate::DeclaredResources>::ALL
                    .iter()
                    .copied()
                    .find(|resource| $crate::ThrottledResource::label(resource) == label)
                    .ok_or_else(|| ::std::format!("{label:?} is not a declared resource").into())
            }
        }
    };
}
