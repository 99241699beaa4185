//! Authentication and authorization of requests. The OpenAPI document says which role an operation
//! needs. An operation without a role in it is refused.

use std::{collections::HashMap, sync::Arc};

use axum::{
    extract::{FromRequestParts, MatchedPath, RawPathParams, Request, State},
    http::{HeaderMap, Method, header, request::Parts},
    middleware::Next,
    response::{IntoResponse, Response},
};
use oncebox_control::{Control, Shown, Token};
use oncebox_model::status::TenantState;
use utoipa::openapi::{OpenApi, PathItem, path::Operation};

use crate::{
    Api, Mode,
    connections::Connection,
    error::{ApiError, Code},
    origin,
    tokens::Role,
};

/// The key of an operation's role in the document.
pub(crate) const ROLE_KEY: &str = "x-role";

/// The authenticated caller of a request.
#[derive(Debug, Clone)]
pub struct Principal {
    name: String,
    role: Role,
    tenant: Option<String>,
    token_id: Option<i64>,
    is_local: bool,
}

impl Principal {
    /// Returns the principal of a caller in this process, which has the database and its key
    /// already. The caller sets it as an extension of the request, which no request over the
    /// network can do.
    pub fn local(actor: impl Into<String>) -> Self {
        Self { name: actor.into(), role: Role::Admin, tenant: None, token_id: None, is_local: true }
    }

    /// Returns the principal of every request to a host without tokens.
    pub(crate) fn open() -> Self {
        Self { is_local: false, ..Self::local("dev") }
    }

    /// Returns the principal of a token.
    pub(crate) fn of_token(token: Token) -> Self {
        Self {
            name: token.name,
            role: token.role.into(),
            tenant: token.tenant,
            token_id: Some(token.token_id),
            is_local: false,
        }
    }

    /// Returns the name that the audit log keeps.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the role.
    pub fn role(&self) -> Role {
        self.role
    }

    /// Returns the only tenant that the principal reaches; `None` where it reaches all.
    pub fn tenant(&self) -> Option<&str> {
        self.tenant.as_deref()
    }

    /// Returns the id of the principal's token, if it has one.
    pub fn token_id(&self) -> Option<i64> {
        self.token_id
    }

    pub(crate) fn is_local(&self) -> bool {
        self.is_local
    }
}

/// The token that an operation requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    /// No token.
    None,
    /// Any token, of any tenant or of none.
    Any,
    /// A token of this role or a higher one, of the path's tenant or of none.
    Role(Role),
    /// An admin's token that is of no tenant.
    Platform,
}

impl Access {
    fn parse(text: &str) -> Option<Self> {
        match text {
            "none" => Some(Self::None),
            "any" => Some(Self::Any),
            "platform" => Some(Self::Platform),
            role => Role::parse(role).map(Self::Role),
        }
    }
}

/// Required access of each operation, by path and method. An operation without an entry is refused.
#[derive(Debug, Default)]
pub(crate) struct Rules(HashMap<String, HashMap<Method, Access>>);

impl Rules {
    /// Reads the rules from a document.
    pub(crate) fn of(document: &OpenApi) -> Self {
        let rules = document.paths.paths.iter().map(|(path, item)| {
            let access = |operation: &Operation| {
                Access::parse(operation.extensions.as_ref()?.get(ROLE_KEY)?.as_str()?)
            };
            let of_path = operations(item)
                .filter_map(|(method, operation)| Some((method, access(operation)?)));
            (path.clone(), of_path.collect())
        });
        Self(rules.collect())
    }

    fn access(&self, path: Option<&str>, method: &Method) -> Result<Access, ApiError> {
        let nothing = || {
            ApiError::new(
                Code::NotFound,
                "there is nothing at this path; `/openapi.json` lists what there is",
            )
        };
        let rules = path.and_then(|path| self.0.get(path)).ok_or_else(nothing)?;
        // HEAD is GET without the body; axum routes it as GET too.
        let method = if method == Method::HEAD { &Method::GET } else { method };
        rules.get(method).copied().ok_or_else(|| {
            let mut methods: Vec<_> = rules.keys().map(Method::as_str).collect();
            methods.sort_unstable();
            let methods = methods.join(", ");
            ApiError::new(Code::MethodNotAllowed, format!("this path takes {methods}"))
                .allowing(methods)
        })
    }
}

/// Returns the operations of a path.
pub(crate) fn operations(item: &PathItem) -> impl Iterator<Item = (Method, &Operation)> {
    let all = [
        (Method::GET, &item.get),
        (Method::PUT, &item.put),
        (Method::POST, &item.post),
        (Method::PATCH, &item.patch),
        (Method::DELETE, &item.delete),
    ];
    all.into_iter().filter_map(|(method, operation)| Some((method, operation.as_ref()?)))
}

/// State of the middleware that authorizes a request before any of its body is read.
#[derive(Clone)]
pub(crate) struct Gate {
    pub(crate) api: Api,
    pub(crate) rules: Arc<Rules>,
}

/// Authenticates and authorizes a request, then calls the next service.
pub(crate) async fn gate(State(gate): State<Gate>, request: Request, next: Next) -> Response {
    let (mut parts, body) = request.into_parts();
    match gate.admit(&mut parts).await {
        Ok(principal) => {
            let shown = principal.clone();
            parts.extensions.insert(Allowed(principal));
            let mut response = next.run(Request::from_parts(parts, body)).await;
            response.extensions_mut().insert(shown);
            response
        }
        Err((error, principal)) => {
            let mut response = error.into_response();
            if let Some(principal) = principal {
                response.extensions_mut().insert(principal);
            }
            response
        }
    }
}

/// A refusal with the refused principal, for the log.
type Refused = (ApiError, Option<Principal>);

impl Gate {
    async fn admit(&self, parts: &mut Parts) -> Result<Principal, Refused> {
        let matched = parts.extensions.get::<MatchedPath>().map(|path| path.as_str().to_owned());
        let access = self.rules.access(matched.as_deref(), &parts.method);
        let params = path_params(parts).await;
        let anonymous = matches!(access, Ok(Access::None));
        let principal = self.principal(parts, anonymous).await.map_err(|error| (error, None))?;
        if !anonymous && let Some(connection) = parts.extensions.get::<Arc<Connection>>() {
            connection.authenticated();
        }
        let refused = |error| (error, Some(principal.clone()));
        let params = params.map_err(refused)?;
        if let Ok(access) = access {
            authorize(&principal, access, &params).map_err(refused)?;
            let ends_it = matched.as_deref() == Some("/v1/tenants/{tenant}")
                && parts.method == Method::DELETE;
            if !ends_it {
                self.check_standing(&principal, access, &params).await.map_err(refused)?;
            }
        } else {
            // Only a principal that may read here learns whether the path exists.
            authorize(&principal, Access::Role(Role::Viewer), &params).map_err(refused)?;
        }
        access.map_err(refused)?;
        Ok(principal)
    }

    /// Checks that the state of the path's tenant permits the request. A suspended tenant refuses
    /// deployments, and every change by its own tokens. A tenant that is being deleted refuses
    /// every change. Reads are permitted in both states.
    async fn check_standing(
        &self,
        principal: &Principal,
        access: Access,
        params: &[(String, String)],
    ) -> Result<(), ApiError> {
        let is_deploying = access == Access::Role(Role::Deployer);
        let looks = matches!(access, Access::None | Access::Any | Access::Role(Role::Viewer));
        let Some(tenant) = of_path(params).filter(|_| !looks) else { return Ok(()) };
        let detail = match self.api.control().tenants().state(tenant).await? {
            Some(TenantState::Suspended) if is_deploying || principal.tenant().is_some() => {
                format!(
                    "tenant `{tenant}` is suspended, and only looked at; `oncebox tenant resume \
                        {tenant}` is for whoever runs the host"
                )
            }
            Some(TenantState::Deleting) => format!("tenant `{tenant}` is being deleted"),
            _ => return Ok(()),
        };
        Err(ApiError::new(Code::TenantNotActive, detail))
    }

    async fn principal(&self, parts: &Parts, anonymous: bool) -> Result<Principal, ApiError> {
        if let Some(principal) = parts.extensions.get::<Principal>() {
            return Ok(principal.clone());
        }
        match self.api.mode() {
            Mode::Open => {
                origin::check(parts)?;
                Ok(Principal::open())
            }
            Mode::Tokens if anonymous => Ok(Principal {
                role: Role::Viewer,
                ..Principal { name: "anyone".to_owned(), ..Principal::open() }
            }),
            Mode::Tokens => self.authenticate(&parts.headers).await,
        }
    }

    async fn authenticate(&self, headers: &HeaderMap) -> Result<Principal, ApiError> {
        let token = bearer(headers).ok_or_else(|| {
            unauthenticated(
                "this needs a token, as `authorization: Bearer obx_…`; `oncebox token \
                create` on the host makes one",
            )
        })?;
        self.api.check_token(token).await.map(Principal::of_token)
    }
}

fn unauthenticated(text: &str) -> ApiError {
    ApiError::new(Code::Unauthenticated, text)
}

impl Api {
    /// Returns the row of a presented token, if it is valid.
    pub(crate) async fn check_token(&self, token: &str) -> Result<Token, ApiError> {
        match self.control().tokens().authenticate(token).await? {
            Shown::Good(token) => Ok(token),
            Shown::Expired => Err(unauthenticated("the token has expired; ask for a new one")),
            Shown::Revoked => Err(unauthenticated("the token was revoked; ask for a new one")),
            Shown::Unknown => Err(unauthenticated(
                "the token is not known here; check that it is whole, and of this installation",
            )),
        }
    }
}

fn authorize(
    principal: &Principal,
    access: Access,
    params: &[(String, String)],
) -> Result<(), ApiError> {
    let needed = match access {
        Access::None | Access::Any => return Ok(()),
        Access::Role(needed) => needed,
        Access::Platform => Role::Admin,
    };
    if let Some(tenant) = principal.tenant()
        && of_path(params) != Some(tenant)
    {
        return Err(ApiError::new(
            Code::Forbidden,
            format!("the token reaches tenant `{tenant}` only"),
        ));
    }
    if principal.role() < needed {
        let detail =
            format!("this needs the role `{needed}`; the token has `{}`", principal.role());
        return Err(ApiError::new(Code::Forbidden, detail));
    }
    if access == Access::Platform
        && let Some(tenant) = principal.tenant()
    {
        let detail =
            format!("this is for whoever runs the host; the token is of tenant `{tenant}`");
        return Err(ApiError::new(Code::Forbidden, detail));
    }
    Ok(())
}

/// Returns the tenant among the parameters of a path.
fn of_path(params: &[(String, String)]) -> Option<&str> {
    params.iter().find(|(name, _)| name == "tenant").map(|(_, value)| value.as_str())
}

/// Returns the path's parameters as the handlers see them. Refuses NUL, which PostgreSQL's texts
/// cannot hold.
async fn path_params(parts: &mut Parts) -> Result<Vec<(String, String)>, ApiError> {
    let params = RawPathParams::from_request_parts(parts, &()).await;
    let params =
        params.map_err(|_| ApiError::invalid("the path is not UTF-8 after percent-decoding"))?;
    let params: Vec<_> =
        params.iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    match params.iter().find(|(_, value)| value.contains('\0')) {
        Some((name, _)) => {
            Err(ApiError::invalid(format!("`{name}` in the path holds a NUL character")))
        }
        None => Ok(params),
    }
}

/// Returns the bearer token, if there is exactly one `authorization` header.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    let value = values.next()?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    (values.next().is_none() && scheme.eq_ignore_ascii_case("bearer")).then(|| token.trim())
}

/// A principal that passed the gate, as an extension of the request. A handler that is reached past
/// the gate finds none and refuses the request.
#[derive(Clone)]
struct Allowed(Principal);

/// An authorized principal, and the functions of the inbox in its name.
pub(crate) struct Caller {
    pub(crate) principal: Principal,
    pub(crate) control: Control,
}

impl FromRequestParts<Api> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, api: &Api) -> Result<Self, ApiError> {
        let allowed = parts.extensions.get::<Allowed>().cloned();
        let Allowed(principal) = allowed.ok_or_else(|| {
            ApiError::new(Code::Forbidden, "nobody was asked whether this is allowed")
        })?;
        Ok(Self { control: api.control().acting_as(principal.name()), principal })
    }
}
