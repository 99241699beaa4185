//! Extractors of requests. They read with bounds, and a refusal names the invalid member.

use std::str::FromStr;

use axum::{
    body::Body,
    extract::{FromRequest, FromRequestParts, Request},
    http::{HeaderMap, header, request::Parts},
};
use bytes::BytesMut;
use futures::StreamExt;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::{
    Api,
    error::{ApiError, Code},
};

/// A JSON body. Unknown members are refused by the types.
pub(crate) struct Json<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequest<Api> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, api: &Api) -> Result<Self, ApiError> {
        let (parts, body) = request.into_parts();
        check_media_type(&parts.headers, &["application/json"])?;
        let limit = api.limits().json_bytes_max;
        check_length(&parts.headers, limit)?;
        let reading = tokio::time::timeout(api.limits().request_timeout, read(body, limit)).await;
        let bytes = reading
            .map_err(|_| ApiError::new(Code::Timeout, "the body did not arrive in time"))??;
        parse(&bytes).map(Self)
    }
}

async fn read(body: Body, limit: usize) -> Result<BytesMut, ApiError> {
    let (mut chunks, mut bytes) = (body.into_data_stream(), BytesMut::new());
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|_| ApiError::invalid("the body broke off"))?;
        if bytes.len() + chunk.len() > limit {
            return Err(too_large(limit));
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    // Types of serde would also accept an array, as members without names.
    if bytes.trim_ascii_start().first().is_some_and(|first| *first != b'{') {
        return Err(ApiError::invalid("the body must be a JSON object"));
    }
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let parsed = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        let text = error.into_inner().to_string();
        ApiError::invalid(if path == "." {
            format!("the body is not right: {text}")
        } else {
            format!("`{path}` is not right: {text}")
        })
    })?;
    deserializer
        .end()
        .map_err(|error| ApiError::invalid(format!("the body is not right: {error}")))?;
    // PostgreSQL's texts hold no NUL.
    match serde_json::from_slice(bytes).ok().and_then(|value| nul(&value)) {
        Some(path) if path.is_empty() => Err(ApiError::invalid("the body holds a NUL character")),
        Some(path) => Err(ApiError::invalid(format!("`{path}` holds a NUL character"))),
        None => Ok(parsed),
    }
}

/// Returns the path of a NUL character in a value; empty for the value itself.
fn nul(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => text.contains('\0').then(String::new),
        Value::Array(items) => {
            items.iter().enumerate().find_map(|(n, item)| Some(joined(&n.to_string(), &nul(item)?)))
        }
        Value::Object(members) => {
            members.iter().find_map(|(name, member)| match name.contains('\0') {
                true => Some(name.clone()),
                false => Some(joined(name, &nul(member)?)),
            })
        }
        _ => None,
    }
}

fn joined(name: &str, rest: &str) -> String {
    if rest.is_empty() { name.to_owned() } else { format!("{name}.{rest}") }
}

/// Refuses a body by the length that its head names, before it is read.
pub(crate) fn check_length(headers: &HeaderMap, limit: usize) -> Result<(), ApiError> {
    let length = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    if length.is_some_and(|length| length > limit as u64) { Err(too_large(limit)) } else { Ok(()) }
}

pub(crate) fn too_large(limit: usize) -> ApiError {
    ApiError::new(
        Code::TooLarge,
        format!("the body has more than {limit} bytes, which is what this path takes"),
    )
}

/// Refuses a body whose type is not among `taken`.
pub(crate) fn check_media_type(headers: &HeaderMap, taken: &[&str]) -> Result<(), ApiError> {
    let given = headers
        .get(header::CONTENT_TYPE)
        .map(|given| String::from_utf8_lossy(given.as_bytes()).to_ascii_lowercase());
    let essence =
        given.as_deref().and_then(|given| given.split(';').next()).unwrap_or_default().trim();
    if taken.contains(&essence) {
        return Ok(());
    }
    Err(ApiError::new(
        Code::UnsupportedMediaType,
        format!("the body must be `{}`; say so in `content-type`", taken.join("` or `")),
    ))
}

/// Decoded parameters of the path.
pub(crate) struct Path<T>(pub(crate) T);

impl<T: DeserializeOwned + Send> FromRequestParts<Api> for Path<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, api: &Api) -> Result<Self, ApiError> {
        let path = axum::extract::Path::from_request_parts(parts, api).await;
        path.map(|axum::extract::Path(path)| Self(path))
            .map_err(|error| ApiError::invalid(error.body_text().to_lowercase()))
    }
}

/// Parameters of the query. A handler takes those that it knows; [`Query::end`] refuses the rest.
pub(crate) struct Query(Vec<(String, String)>);

impl FromRequestParts<Api> for Query {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &Api) -> Result<Self, ApiError> {
        let query = parts.uri.query().unwrap_or_default();
        let pairs: Vec<_> = form_urlencoded::parse(query.as_bytes())
            .map(|(k, v)| (k.into_owned(), v.into_owned()))
            .collect();
        match pairs.iter().find(|(name, value)| {
            name.contains('\0') || value.contains('\0') || value.contains('\u{fffd}')
        }) {
            Some((name, _)) => {
                Err(ApiError::invalid(format!("query parameter `{name}` holds what is no text")))
            }
            None => Ok(Self(pairs)),
        }
    }
}

impl Query {
    /// Takes a parameter. Refuses one that is there twice.
    fn take(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        let Some(found) = self.0.iter().position(|(key, _)| key == name) else { return Ok(None) };
        let (_, value) = self.0.swap_remove(found);
        match self.0.iter().any(|(key, _)| key == name) {
            true => Err(ApiError::invalid(format!("query parameter `{name}` is there twice"))),
            false => Ok(Some(value)),
        }
    }

    /// Takes a parameter whose value must be among `known`.
    pub(crate) fn one_of(
        &mut self,
        name: &str,
        known: &[&str],
    ) -> Result<Option<String>, ApiError> {
        match self.take(name)? {
            Some(value) if !known.contains(&value.as_str()) => Err(ApiError::invalid(format!(
                "query parameter `{name}` is `{value}`; use {}",
                known.join(", ")
            ))),
            value => Ok(value),
        }
    }

    /// Takes a parameter that is `true` or `false`. Returns false where it is missing.
    pub(crate) fn flag(&mut self, name: &str) -> Result<bool, ApiError> {
        Ok(self.one_of(name, &["true", "false"])?.as_deref() == Some("true"))
    }

    /// Takes a parameter with any text.
    pub(crate) fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        self.take(name)
    }

    /// Takes a parameter and parses its text. `what` describes the valid texts, for the refusal.
    pub(crate) fn parsed<T: FromStr>(
        &mut self,
        name: &str,
        what: &str,
    ) -> Result<Option<T>, ApiError> {
        let Some(text) = self.take(name)? else { return Ok(None) };
        let parsed = text.parse().map_err(|_| {
            ApiError::invalid(format!("query parameter `{name}` is `{text}`; it must be {what}"))
        });
        Ok(Some(parsed?))
    }

    /// Takes the number of rows.
    pub(crate) fn limit(&mut self) -> Result<i64, ApiError> {
        const DEFAULT: i64 = 50;
        const MAX: i64 = 1_000;
        let Some(text) = self.take("limit")? else { return Ok(DEFAULT) };
        let limit = text.parse().ok().filter(|limit| (1..=MAX).contains(limit));
        limit.ok_or_else(|| {
            ApiError::invalid(format!("query parameter `limit` is `{text}`; it must be 1 to {MAX}"))
        })
    }

    /// Refuses the parameters that no handler took.
    pub(crate) fn end(self) -> Result<(), ApiError> {
        match self.0.first() {
            Some((name, _)) => {
                Err(ApiError::invalid(format!("this path takes no query parameter `{name}`")))
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Sample {
        #[allow(dead_code, reason = "only parsed")]
        name: String,
        #[allow(dead_code, reason = "only parsed")]
        more: Option<serde_json::Map<String, Value>>,
    }

    fn check(body: &str, said: &str) {
        let error = parse::<Sample>(body.as_bytes()).expect_err(body).answer("1", false);
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let body =
            runtime.block_on(axum::body::to_bytes(error.into_body(), 10_000)).expect("a body");
        let detail = serde_json::from_slice::<Value>(&body).expect("JSON")["detail"]
            .as_str()
            .expect("a detail")
            .to_owned();
        assert!(detail.contains(said), "{detail}");
    }

    #[test]
    fn what_is_wrong_is_named() {
        check("", "EOF");
        check("{\"name\": 1}", "`name` is not right");
        check("{\"nam\": \"x\"}", "`nam`");
        check("{\"name\": \"x\", \"name\": \"y\"}", "duplicate field `name`");
        check("{\"name\": \"x\"} x", "trailing");
        check("{\"name\": \"a\\u0000b\"}", "`name` holds a NUL");
        check("{\"name\": \"a\", \"more\": {\"b\": [1, \"\\u0000\"]}}", "`more.b.1` holds a NUL");
        assert!(
            parse::<Sample>(b"{\"name\": \"a\\\\u0000b\"}").is_ok(),
            "an escaped backslash is no NUL"
        );
    }
}
