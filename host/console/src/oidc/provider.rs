//! The flow of a sign-in at the provider.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use openidconnect::{
    AuthorizationCode, ClaimsVerificationError, ClientId, ClientSecret, CsrfToken,
    EndpointMaybeSet, EndpointNotSet, EndpointSet, IssuerUrl, Nonce, PkceCodeChallenge,
    PkceCodeVerifier, RedirectUrl, Scope,
    core::{CoreAuthenticationFlow, CoreClient, CoreIdToken, CoreProviderMetadata},
};
use serde_json::{Map, Value};
use tokio::{
    sync::{Mutex, Semaphore, SemaphorePermit},
    time::timeout,
};

use super::{http::Http, options::OidcOptions};

/// Time for which the provider's addresses and keys are used again.
const FRESH: Duration = Duration::from_secs(300);

/// Time after which they are asked for again, where a signature does not fit: the provider may have
/// changed its keys.
const FRESH_LEAST: Duration = Duration::from_secs(10);

/// Time for which a failure to ask for them is given again.
const FRESH_FAILURE: Duration = Duration::from_secs(5);

/// Largest number of codes that are exchanged at a time, and the longest wait of another visitor.
const TURNS_MAX: usize = 4;
const TURN_WAIT: Duration = Duration::from_secs(10);

/// Path to which the provider sends visitors back.
pub(crate) const RETURN: &str = "/console/login/return";

type Client = CoreClient<
    EndpointSet,
    EndpointNotSet,
    EndpointNotSet,
    EndpointNotSet,
    EndpointMaybeSet,
    EndpointMaybeSet,
>;

/// The identity provider.
pub(crate) struct Provider {
    pub(super) options: OidcOptions,
    issuer: IssuerUrl,
    redirect_url: RedirectUrl,
    http: Http,
    metadata: Mutex<Option<(Instant, Result<CoreProviderMetadata, String>)>>,
    turns: Semaphore,
}

/// A sign-in on its way: what the browser keeps until the provider sends it back.
pub(super) struct Pending {
    /// Random text that the provider sends back.
    pub(super) state: String,
    /// Random text that the ID token must have.
    pub(super) nonce: String,
    /// The secret of the code's challenge.
    pub(super) verifier: String,
    /// Page to go to afterwards.
    pub(super) next: String,
}

impl Pending {
    /// Returns the value of the cookie.
    pub(super) fn encode(&self) -> String {
        let parts = [&self.state, &self.nonce, &self.verifier, &self.next];
        parts.map(|part| BASE64_URL_SAFE_NO_PAD.encode(part)).join(".")
    }

    /// Reads the value of the cookie.
    pub(super) fn decode(cookie: &str) -> Option<Self> {
        let part = |part| String::from_utf8(BASE64_URL_SAFE_NO_PAD.decode(part).ok()?).ok();
        let parts: Vec<String> = cookie.split('.').map(part).collect::<Option<_>>()?;
        let [state, nonce, verifier, next] = <[String; 4]>::try_from(parts).ok()?;
        let is_whole = [&state, &nonce, &verifier].iter().all(|secret| secret.len() >= 16);
        is_whole.then_some(Self { state, nonce, verifier, next })
    }
}

impl Provider {
    /// Checks the options; asks nobody.
    pub(crate) fn new(options: OidcOptions) -> Result<Self> {
        let issuer = IssuerUrl::new(options.issuer.clone()).context("`oidc.issuer` is no URL")?;
        let redirect_url = RedirectUrl::new(options.redirect_url.clone());
        let redirect_url = redirect_url.context("`oidc.redirect_url` is no URL")?;
        for (name, url) in [("issuer", issuer.url()), ("redirect_url", redirect_url.url())] {
            let host = url.host_str().unwrap_or_default();
            let is_near = matches!(host, "localhost" | "127.0.0.1" | "[::1]");
            ensure!(
                url.scheme() == "https" || url.scheme() == "http" && is_near,
                "`oidc.{name}` must begin with `https:`, unless it is on this machine"
            );
        }
        ensure!(
            redirect_url.url().path() == RETURN && redirect_url.url().query().is_none(),
            "`oidc.redirect_url` must end with `{RETURN}`: the address of the console, as browsers \
                reach it"
        );
        ensure!(!options.client_id.is_empty(), "`oidc.client_id` is missing");
        ensure!(
            !options.grants.is_empty(),
            "`oidc.grants` is empty, so that nobody could sign in; add `<group>=<role>`"
        );
        let is_encrypted = issuer.url().scheme() == "https";
        let http = Http::new(options.authorities.as_deref(), is_encrypted);
        let http = http.context("`oidc.ca_file`")?;
        let (metadata, turns) = (Mutex::default(), Semaphore::new(TURNS_MAX));
        Ok(Self { options, issuer, redirect_url, http, metadata, turns })
    }

    /// Returns the name that visitors and the audit log see.
    pub(crate) fn name(&self) -> &str {
        self.issuer.url().host_str().unwrap_or_default()
    }

    /// Returns whether browsers reach the console over encrypted connections.
    pub(super) fn is_encrypted(&self) -> bool {
        self.redirect_url.url().scheme() == "https"
    }

    /// Returns the page of the provider to send a visitor to, and what the browser keeps.
    pub(super) async fn begin(&self, next: &str) -> Result<(String, Pending)> {
        let client = self.relying_party(FRESH).await?;
        let (challenge, verifier) = PkceCodeChallenge::new_random_sha256();
        let (state, nonce) = (CsrfToken::new_random, Nonce::new_random);
        let flow = CoreAuthenticationFlow::AuthorizationCode;
        let request = client.authorize_url(flow, state, nonce).set_pkce_challenge(challenge);
        let scopes = self.options.scopes.iter().cloned().map(Scope::new);
        let (url, state, nonce) = request.add_scopes(scopes).url();
        let pending = Pending {
            state: state.into_secret(),
            nonce: nonce.secret().clone(),
            verifier: verifier.into_secret(),
            next: next.to_owned(),
        };
        Ok((url.into(), pending))
    }

    /// Exchanges the code that a visitor brought back, and returns the claims of the ID token.
    pub(super) async fn finish(
        &self,
        code: String,
        pending: Pending,
    ) -> Result<Map<String, Value>> {
        let client = self.relying_party(FRESH).await?;
        let exchange = client.exchange_code(AuthorizationCode::new(code));
        let exchange = exchange.context("the provider has no token endpoint")?;
        let exchange = exchange.set_pkce_verifier(PkceCodeVerifier::new(pending.verifier));
        let answer = exchange.request_async(&self.http).await.map_err(plain)?;
        let token = answer.extra_fields().id_token().context("there is no ID token")?;
        let nonce = Nonce::new(pending.nonce);
        match token.claims(&client.id_token_verifier(), &nonce) {
            Err(ClaimsVerificationError::SignatureVerification(_)) => {
                let client = self.relying_party(FRESH_LEAST).await?;
                token.claims(&client.id_token_verifier(), &nonce).map_err(plain)?;
            }
            checked => drop(checked.map_err(plain)?),
        }
        claims(token)
    }

    /// Returns this installation at the provider, by documents that are not older than this.
    async fn relying_party(&self, fresh: Duration) -> Result<Client> {
        let mut kept = self.metadata.lock().await;
        let is_fresh = |(at, found): &&(Instant, Result<_, _>)| {
            at.elapsed() < if found.is_ok() { fresh } else { FRESH_FAILURE }
        };
        let found = match kept.as_ref().filter(is_fresh) {
            Some((_, found)) => found.clone(),
            None => {
                let issuer = self.issuer.clone();
                let found = CoreProviderMetadata::discover_async(issuer, &self.http).await;
                let found = found.map_err(|error| plain(error).to_string());
                *kept = Some((Instant::now(), found.clone()));
                found
            }
        };
        drop(kept);
        let metadata = found.map_err(|error| anyhow!(error))?;
        let OidcOptions { client_id, client_secret, .. } = &self.options;
        let secret = client_secret.clone().map(ClientSecret::new);
        let client =
            CoreClient::from_provider_metadata(metadata, ClientId::new(client_id.clone()), secret);
        Ok(client.set_redirect_uri(self.redirect_url.clone()))
    }

    /// Waits for a turn to exchange a code, for a limited time. Anyone can bring a code.
    pub(super) async fn turn(&self) -> Option<SemaphorePermit<'_>> {
        timeout(TURN_WAIT, self.turns.acquire()).await.ok()?.ok()
    }
}

/// Returns the claims of a verified ID token, with those that the standard does not name.
fn claims(token: &CoreIdToken) -> Result<Map<String, Value>> {
    let text = token.to_string();
    let Some(payload) = text.split('.').nth(1) else { bail!("the ID token has no claims") };
    Ok(serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(payload)?)?)
}

/// Returns an error with its causes. Its `Debug` form may hold answers with tokens.
fn plain(error: impl std::error::Error) -> anyhow::Error {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    anyhow!(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sign_in_is_read_as_it_was_written_and_nothing_else_is_one() {
        let text = |byte: char| byte.to_string().repeat(22);
        let pending = Pending {
            state: text('s'),
            nonce: text('n'),
            verifier: text('v'),
            next: "/console/tenants/a?b=c".to_owned(),
        };
        let cookie = pending.encode();
        let read = Pending::decode(&cookie).expect("a sign-in");
        assert_eq!(
            [read.state, read.nonce, read.verifier, read.next],
            [pending.state, pending.nonce, pending.verifier, pending.next]
        );
        let empty =
            Pending { state: String::new(), ..Pending::decode(&cookie).expect("a sign-in") };
        for other in ["", "...", "a.b.c.d", &cookie[1..], &format!("{cookie}.a"), &empty.encode()] {
            assert!(Pending::decode(other).is_none(), "{other}");
        }
    }
}
