//! What can be throttled: resources that a program declares, and those it learns at run time.

use std::fmt;
use std::io::Write as _;
use std::time::Duration;

use diesel::deserialize::{self, FromSql, FromSqlRow};
use diesel::expression::AsExpression;
use diesel::pg::{Pg, PgValue};
use diesel::serialize::{self, IsNull, Output, ToSql};

use crate::error::{Error, Input, Result};
use crate::schema::resource_control::sql_types::ThrottledResourceEnum;
use crate::text;
use crate::time;

/// Something that is a label of the enumerated type `resource_control.throttled_resource_enum`.
///
/// Implemented by [`throttled_resources!`](crate::throttled_resources); by hand it makes any enum a
/// resource, such as one that is mapped by the `diesel-derive-enum` crate.
pub trait ThrottledResource {
    /// Its label in the database.
    fn label(&self) -> &str;
}

/// Resources that a program declares with their intervals, so that [`sync`](crate::sync) can add
/// them.
pub trait DeclaredResources: ThrottledResource + Sized + 'static {
    /// All of them.
    const ALL: &'static [Self];

    /// How much time passes between two grants, at least.
    fn interval(&self) -> Duration;
}

/// A resource whose label is known at run time only. Maps to the PostgreSQL type in Diesel's queries,
/// where a label that the database does not have is an error.
#[derive(Debug, Clone, PartialEq, Eq, Hash, AsExpression, FromSqlRow)]
#[diesel(sql_type = ThrottledResourceEnum)]
pub struct ResourceLabel(pub String);

/// The label.
impl fmt::Display for ResourceLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl ThrottledResource for ResourceLabel {
    fn label(&self) -> &str {
        &self.0
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

impl<R: ThrottledResource> ThrottledResource for &R {
    fn label(&self) -> &str {
        (**self).label()
    }
}

/// The declared label and its interval in microseconds, rounded up, if PostgreSQL can have them.
pub(super) fn checked<R: DeclaredResources>(resource: &R) -> Result<(String, i64)> {
    let label = resource.label().to_owned();
    if label.contains('\0') {
        return Err(Error::Input(Input::NulCharacter));
    }
    if label.is_empty() || label.len() > text::LONGEST_LABEL {
        return Err(Error::Input(Input::BadLabel { label }));
    }
    match time::microseconds(resource.interval()) {
        Some(microseconds) => Ok((label, microseconds)),
        None => Err(Error::Input(Input::BadInterval { label })),
    }
}

/// Declares an enum of throttled resources, each with its label in the database and its interval.
///
/// The enum is `Copy`, implements [`ThrottledResource`](crate::ThrottledResource) and
/// [`DeclaredResources`](crate::DeclaredResources), and maps to the PostgreSQL type
/// `resource_control.throttled_resource_enum` in Diesel's queries. See
/// [`Throttle`](crate::Throttle) for an example.
#[macro_export]
macro_rules! throttled_resources {
    (
        $(#[$meta:meta])*
        $visibility:vis enum $name:ident {
            $( $(#[$variant_meta:meta])* $variant:ident = $label:literal every $interval:expr ),+ $(,)?
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
            fn label(&self) -> &str {
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
                    .ok_or_else(|| ::std::format!("{label:?} is no declared resource").into())
            }
        }
    };
}
