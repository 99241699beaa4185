//! Calls of host functions with many parameters, each by its name.

/// Builds the query that calls a function of `oncebox_host`. One list of parameters and values
/// yields the statement's text, built once per program, and its bound values. So no value goes to
/// another parameter than the one beside it.
macro_rules! host_call {
    ($function:literal { $($parameter:ident: $value:expr),+ $(,)? }) => {{
        static SQL: std::sync::LazyLock<String> = std::sync::LazyLock::new(|| {
            $crate::host_call::sql($function, &[$(stringify!($parameter)),+])
        });
        sqlx::query(SQL.as_str())$(.bind($value))+
    }};
}
pub(crate) use host_call;

/// Returns the statement that calls a function with these parameters.
pub(crate) fn sql(function: &str, parameters: &[&str]) -> String {
    let arguments: Vec<_> =
        (1..).zip(parameters).map(|(n, parameter)| format!("{parameter} => ${n}")).collect();
    format!("SELECT * FROM oncebox_host.{function}({})", arguments.join(", "))
}

/// Returns one column of the rows that a function takes as arrays.
pub(crate) fn column<'a, R, V>(rows: &'a [R], value: impl Fn(&'a R) -> V) -> Vec<V> {
    rows.iter().map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::sql;

    #[test]
    fn each_parameter_has_the_number_of_its_value() {
        assert_eq!(
            sql("release", &["p_secret", "p_id"]),
            "SELECT * FROM oncebox_host.release(p_secret => $1, p_id => $2)"
        );
    }
}
