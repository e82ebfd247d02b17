//! Subqueries that Diesel composes like tables.

/// Declares a query source from an SQL text: `FROM (…) AS "name"`.
///
/// Diesel's `table!` declares the columns under the name of the view, and this macro puts the text in place of that name in
/// the `FROM` clause. It uses `diesel::internal`, as `table!` does, so this crate is pinned to Diesel's minor version.
macro_rules! view {
    ($(#[$meta:meta])* $view:ident of $table:ident [$($column:ident),+ $(,)?] = $($sql:expr),+;) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, Default, diesel::query_builder::QueryId)]
        pub struct $view;

        impl diesel::QuerySource for $view {
            type FromClause = Self;
            type DefaultSelection = <$table::table as diesel::Table>::AllColumns;

            fn from_clause(&self) -> Self::FromClause {
                *self
            }

            fn default_selection(&self) -> Self::DefaultSelection {
                $table::all_columns
            }
        }

        impl diesel::Table for $view {
            type PrimaryKey = <$table::table as diesel::Table>::PrimaryKey;
            type AllColumns = <$table::table as diesel::Table>::AllColumns;

            fn primary_key(&self) -> Self::PrimaryKey {
                diesel::Table::primary_key(&$table::table)
            }

            fn all_columns() -> Self::AllColumns {
                $table::all_columns
            }
        }

        impl diesel::query_builder::AsQuery for $view {
            type SqlType = $table::SqlType;
            type Query = diesel::internal::table_macro::SelectStatement<
                diesel::internal::table_macro::FromClause<Self>,
            >;

            fn as_query(self) -> Self::Query {
                Self::Query::simple(self)
            }
        }

        impl diesel::query_builder::QueryFragment<diesel::pg::Pg> for $view {
            fn walk_ast<'b>(
                &'b self,
                mut out: diesel::query_builder::AstPass<'_, 'b, diesel::pg::Pg>,
            ) -> diesel::QueryResult<()> {
                out.push_sql("(");
                $( out.push_sql($sql); )+
                out.push_sql(") AS ");
                diesel::query_builder::QueryFragment::walk_ast(&$table::table, out)
            }
        }

        impl diesel::query_source::AppearsInFromClause<$table::table> for $view {
            type Count = diesel::query_source::Once;
        }

        $( impl diesel::SelectableExpression<$view> for $table::$column {} )+
    };
}

pub(super) use view;
