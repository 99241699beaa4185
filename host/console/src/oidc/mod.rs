//! Signing in at an identity provider, by OpenID Connect: the authorization code flow with PKCE.
//! The provider says who a visitor is and which groups the visitor is in; the configuration says
//! which rights a group has.

// The configuration, and what a claim grants.
mod options;
// Requests to the provider.
mod http;
// The flow: where a visitor is sent, and what comes back.
mod provider;
// The two pages.
mod pages;

pub use options::{Grant, OidcOptions};

pub(crate) use pages::{begin, finish};
pub(crate) use provider::Provider;
