//! The URL of a tenant's database.

use oncebox_model::error::InboxError;
use sqlx::postgres::PgConnectOptions;

/// Parameters that a URL may hold. Any other would reach into the host: its files, its sockets, the
/// settings of its sessions.
const PARAMETERS: [&str; 4] = ["sslmode", "ssl-mode", "sslrootcert", "ssl-root-cert"];

/// Address of a tenant's database, with the login that the host uses there. It holds a password, so
/// it is neither shown nor logged.
#[derive(Clone)]
pub struct DatabaseUrl {
    text: String,
    options: PgConnectOptions,
    shown: String,
}

impl DatabaseUrl {
    /// Parses a URL such as
    /// `postgres://login:password@db.example.com:5432/name?sslmode=verify-full`.
    ///
    /// # Errors
    /// `Invalid` where the URL is unreadable, lacks a login, host or database, or holds other
    /// parameters. The text repeats nothing of the URL.
    pub fn parse(text: &str) -> Result<Self, InboxError> {
        let text = text.trim();
        check(text).map_err(|what| {
            InboxError::Invalid(format!(
                "the database URL {what}; it looks like \
                    `postgres://login:password@host:5432/name?sslmode=require`"
            ))
        })?;
        // The parser's own error may repeat a part of the URL.
        let unreadable = |_| {
            InboxError::Invalid(
                "the database URL cannot be read; percent-encode what is special \
                in login and password"
                    .into(),
            )
        };
        let mut options: PgConnectOptions = text.parse().map_err(unreadable)?;
        if !has_password(text) {
            // Otherwise the driver sends the password from the host's environment or its password
            // file.
            options = options.password("");
        }
        let shown = format!(
            "{}:{}/{}",
            options.get_host(),
            options.get_port(),
            options.get_database().unwrap_or_default()
        );
        Ok(Self { text: text.to_owned(), options, shown })
    }

    /// Returns host, port and name of the database, for display.
    pub fn shown(&self) -> &str {
        &self.shown
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    pub(super) fn options(&self) -> &PgConnectOptions {
        &self.options
    }
}

impl std::fmt::Debug for DatabaseUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DatabaseUrl({})", self.shown)
    }
}

/// Checks that a URL names login, host and database, and holds only permitted parameters. The
/// driver fills in missing parts from the host's environment, and takes more parameters than a
/// tenant may set.
fn check(text: &str) -> Result<(), &'static str> {
    // The driver's parser skips some of these characters, and would read another URL than this
    // check.
    if text.contains(|c: char| c == '#' || c == '\\' || c.is_whitespace() || c.is_control()) {
        return Err("holds a character that has to be percent-encoded");
    }
    let rest = text
        .strip_prefix("postgres://")
        .or_else(|| text.strip_prefix("postgresql://"))
        .ok_or("must begin with `postgres://`")?;
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, name) = rest.split_once('/').unwrap_or((rest, ""));
    let (login, host) = authority.rsplit_once('@').ok_or("must name a login")?;
    let is_socket = host.starts_with('/') || host.to_ascii_lowercase().starts_with("%2f");
    if login.split(':').next().unwrap_or_default().is_empty() {
        return Err("must name a login");
    }
    if host.is_empty() || host.starts_with(':') || is_socket {
        return Err("must name a host");
    }
    if name.is_empty() || name.contains('/') {
        return Err("must name a database");
    }
    let known = |pair: &str| PARAMETERS.contains(&pair.split('=').next().unwrap_or_default());
    if query.split('&').filter(|pair| !pair.is_empty()).all(known) {
        Ok(())
    } else {
        Err("takes no parameters but `sslmode` and `sslrootcert`")
    }
}

fn has_password(text: &str) -> bool {
    let authority = text
        .split_once("://")
        .map_or("", |(_, rest)| rest.split(['/', '?']).next().unwrap_or_default());
    authority.rsplit_once('@').is_some_and(|(login, _)| {
        login.split_once(':').is_some_and(|(_, password)| !password.is_empty())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_says_where_and_who_and_nothing_else() {
        assert!(has_password("postgres://a:b@h/d"));
        assert!(!has_password("postgres://a:@h/d") && !has_password("postgres://a@h/d"));
        let url = DatabaseUrl::parse(
            " postgres://acme:p%40ss@db.example.com:6432/orders?sslmode=require\n",
        )
        .expect("a URL");
        assert_eq!(url.shown(), "db.example.com:6432/orders");
        assert_eq!(format!("{url:?}"), "DatabaseUrl(db.example.com:6432/orders)");
        for (text, what) in [
            ("mysql://a:secret@h/d", "must begin with"),
            ("postgres://h/d", "must name a login"),
            ("postgres://a:secret@%\t2Fvar%2Frun/d", "percent-encoded"),
            ("postgres://@h#:secret@x/d", "percent-encoded"),
            ("postgres://:secret@h/d", "must name a login"),
            ("postgres://a:secret@/d", "must name a host"),
            ("postgres://a:secret@%2Fvar%2Frun/d", "must name a host"),
            ("postgres://a:secret@h", "must name a database"),
            ("postgres://a:secret@h/d?options=-csearch_path=x", "takes no parameters"),
            ("postgres://a:secret@h/d?sslmode=require&host=/var/run", "takes no parameters"),
            ("postgres://a:secret@h:port/d", "cannot be read"),
            ("postgres://a:secret@h/d?sslmode=secret", "cannot be read"),
        ] {
            let said = DatabaseUrl::parse(text).expect_err(text).to_string();
            assert!(said.contains(what) && !said.contains("secret"), "`{text}`: {said}");
        }
    }
}
