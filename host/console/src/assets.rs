//! Files of the pages, within the program.

use std::{io::Write, sync::LazyLock};

use axum::{
    body::Bytes,
    extract::Path,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use flate2::{Compression, write::GzEncoder};
use sha2::{Digest, Sha256};

/// A file with its name in URLs, which changes with its content.
pub(crate) struct Asset {
    /// Name in URLs: the digest's first digits are in it.
    pub(crate) name: String,
    /// Digest for the attribute `integrity`.
    pub(crate) integrity: String,
    content_type: &'static str,
    compressed: Bytes,
    content: &'static [u8],
}

/// All files.
pub(crate) struct Assets {
    pub(crate) style: Asset,
    pub(crate) script: Asset,
    pub(crate) htmx: Asset,
    pub(crate) sse: Asset,
    pub(crate) icon: Asset,
}

pub(crate) static ASSETS: LazyLock<Assets> = LazyLock::new(|| Assets {
    style: asset("console", "css", include_bytes!("../assets/console.css")),
    script: asset("console", "js", include_bytes!("../assets/console.js")),
    htmx: asset("htmx", "js", include_bytes!("../assets/htmx.min.js")),
    sse: asset("hx-sse", "js", include_bytes!("../assets/hx-sse.min.js")),
    icon: asset("icon", "svg", include_bytes!("../assets/icon.svg")),
});

fn asset(stem: &str, extension: &str, content: &'static [u8]) -> Asset {
    let digest = Sha256::digest(content);
    Asset {
        name: format!("{stem}-{}.{extension}", &hex::encode(digest)[..12]),
        integrity: format!("sha256-{}", base64(&digest)),
        content_type: match extension {
            "css" => "text/css; charset=utf-8",
            "svg" => "image/svg+xml",
            _ => "text/javascript; charset=utf-8",
        },
        compressed: compressed(content).into(),
        content,
    }
}

fn base64(bytes: &[u8]) -> String {
    use base64::Engine;
    base64::engine::general_purpose::STANDARD.encode(bytes)
}

/// Returns a body with less bytes, for a client that takes gzip.
pub(crate) fn compressed(body: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    // Memory does not refuse what is written to it.
    let _ = encoder.write_all(body);
    encoder.finish().unwrap_or_default()
}

/// Returns whether a client takes gzip.
pub(crate) fn takes_gzip(headers: &HeaderMap) -> bool {
    let accepted = headers.get(header::ACCEPT_ENCODING).and_then(|value| value.to_str().ok());
    accepted.is_some_and(|accepted| {
        accepted
            .split(',')
            .any(|coding| coding.split(';').next().is_some_and(|c| c.trim() == "gzip"))
    })
}

/// Serves a file, for ever: another content has another name.
pub(crate) async fn serve(Path(name): Path<String>, headers: HeaderMap) -> Response {
    let assets = &*ASSETS;
    let all = [&assets.style, &assets.script, &assets.htmx, &assets.sse, &assets.icon];
    let Some(asset) = all.into_iter().find(|asset| asset.name == name) else {
        return (StatusCode::NOT_FOUND, "there is no such file; load the page again")
            .into_response();
    };
    let cached = [
        (header::CONTENT_TYPE, asset.content_type),
        (header::CACHE_CONTROL, "public, max-age=31536000, immutable"),
        (header::VARY, "accept-encoding"),
    ];
    if takes_gzip(&headers) {
        (cached, [(header::CONTENT_ENCODING, "gzip")], asset.compressed.clone()).into_response()
    } else {
        (cached, asset.content).into_response()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The files of htmx are those of its release 4.0.1, byte for byte.
    #[test]
    fn htmx_is_as_it_was_published() {
        for (content, digest) in [
            (
                &include_bytes!("../assets/htmx.min.js")[..],
                "a0abb04f2f45a1f89d1d4844023245537e5e6014c87b144553e0607b4cc32130",
            ),
            (
                &include_bytes!("../assets/hx-sse.min.js")[..],
                "18ef2761356ec1fe0bb6d92612315b37517a7c1e9856b661c5ae81fef239d103",
            ),
        ] {
            assert_eq!(hex::encode(Sha256::digest(content)), digest);
        }
    }
}
