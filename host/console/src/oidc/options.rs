//! The options of the provider, and the rights that claims grant.

use std::{fmt, str::FromStr};

use oncebox_api::session::TokenRole;
use serde_json::{Map, Value};

/// The identity provider, and the rights of its people.
#[derive(Clone)]
pub struct OidcOptions {
    /// URL of the issuer, below which `/.well-known/openid-configuration` is.
    pub issuer: String,
    /// Id of this installation at the provider.
    pub client_id: String,
    /// Its secret; none for a public client.
    pub client_secret: Option<String>,
    /// Address of `/console/login/return`, as browsers reach it.
    pub redirect_url: String,
    /// Scopes asked for, besides `openid`.
    pub scopes: Vec<String>,
    /// Claim of the ID token with the person's name.
    pub name_claim: String,
    /// Claim with the person's groups: a text, or a list of texts.
    pub groups_claim: String,
    /// Rights of groups. The first one whose group the person is in applies.
    pub grants: Vec<Grant>,
    /// Certificates (PEM) of authorities to trust, beside the system's.
    pub authorities: Option<Vec<u8>>,
}

impl fmt::Debug for OidcOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OidcOptions").field("issuer", &self.issuer).finish_non_exhaustive()
    }
}

/// Rights of a group: `<group>=<role>`, or `<group>=<role>@<tenant>` for one tenant alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// Name of the group.
    pub group: String,
    /// Rights of its people.
    pub role: TokenRole,
    /// The only tenant that they reach; all without one.
    pub tenant: Option<String>,
}

impl FromStr for Grant {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let shape = "use `<group>=<role>` or `<group>=<role>@<tenant>`";
        // A group may have a `=` in its name, as those of directories have.
        let (group, rights) =
            text.rsplit_once('=').ok_or_else(|| format!("`{text}` grants nothing; {shape}"))?;
        let (role, tenant) = match rights.split_once('@') {
            Some((role, tenant)) => (role, Some(tenant.to_owned())),
            None => (rights, None),
        };
        if group.is_empty() || tenant.as_ref().is_some_and(String::is_empty) {
            return Err(format!("`{text}` lacks a group or a tenant; {shape}"));
        }
        let role = serde_json::from_value(Value::String(role.to_owned())).map_err(|_| {
            format!(
                "`{role}` in `{text}` is no role; use `viewer`, `operator`, `deployer` or `admin`"
            )
        })?;
        Ok(Self { group: group.to_owned(), role, tenant })
    }
}

impl OidcOptions {
    /// Returns the name of a person with these claims, and the grant that applies.
    ///
    /// # Errors
    /// The reason for which nobody with these claims may sign in.
    pub(super) fn admit(&self, claims: &Map<String, Value>) -> Result<(String, &Grant), String> {
        let is_email = [&self.name_claim, &self.groups_claim].iter().any(|it| *it == "email");
        if is_email && claims.get("email_verified") != Some(&Value::Bool(true)) {
            return Err("the provider has not verified the address of this account".to_owned());
        }
        let Some(Value::String(name)) = claims.get(&self.name_claim) else {
            return Err(format!("the ID token has no `{}`", self.name_claim));
        };
        let groups: Vec<&str> = match claims.get(&self.groups_claim) {
            Some(Value::String(group)) => vec![group],
            Some(Value::Array(groups)) => groups.iter().filter_map(Value::as_str).collect(),
            _ => Vec::new(),
        };
        let grant = self.grants.iter().find(|grant| groups.contains(&grant.group.as_str()));
        let grant = grant.ok_or_else(|| {
            format!(
                "no group of `{name}` has rights here; `oidc.grants` of the host's configuration \
                    says which groups have"
            )
        })?;
        Ok((name.clone(), grant))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn options(grants: &[&str]) -> OidcOptions {
        OidcOptions {
            issuer: "https://login.example".to_owned(),
            client_id: "oncebox".to_owned(),
            client_secret: None,
            redirect_url: "https://oncebox.example/console/login/return".to_owned(),
            scopes: Vec::new(),
            name_claim: "preferred_username".to_owned(),
            groups_claim: "groups".to_owned(),
            grants: grants.iter().map(|it| it.parse().expect("a grant")).collect(),
            authorities: None,
        }
    }

    fn admitted(options: &OidcOptions, claims: Value) -> Result<(String, TokenRole), String> {
        let claims = claims.as_object().expect("claims");
        options.admit(claims).map(|(name, grant)| (name, grant.role))
    }

    #[test]
    fn a_grant_says_group_role_and_tenant() {
        let grant = |group: &str, role, tenant: Option<&str>| Grant {
            group: group.to_owned(),
            role,
            tenant: tenant.map(str::to_owned),
        };
        for (text, read) in [
            ("platform=admin", grant("platform", TokenRole::Admin, None)),
            ("shop=operator@acme", grant("shop", TokenRole::Operator, Some("acme"))),
            ("cn=ops,dc=ex=viewer", grant("cn=ops,dc=ex", TokenRole::Viewer, None)),
        ] {
            assert_eq!(text.parse(), Ok(read));
        }
        for (text, error) in [
            ("platform", "grants nothing"),
            ("=admin", "lacks a group"),
            ("a=admin@", "lacks a group or a tenant"),
            ("a=root", "`root` in `a=root` is no role"),
            ("a=Admin", "is no role"),
        ] {
            let refused = text.parse::<Grant>().expect_err(text);
            assert!(refused.contains(error), "{refused}");
        }
    }

    // What could go wrong: someone gets the rights of a group that the provider did not name, or of
    // a second group.
    #[test]
    fn the_first_group_with_rights_decides() {
        let options = options(&["ops=viewer", "platform=admin"]);
        let claims = |groups: Value| json!({ "preferred_username": "ada", "groups": groups });
        let ada = |role| Ok(("ada".to_owned(), role));
        for (groups, role) in [
            (json!(["platform"]), TokenRole::Admin),
            (json!("platform"), TokenRole::Admin),
            (json!(["platform", "ops", 7]), TokenRole::Viewer),
        ] {
            assert_eq!(admitted(&options, claims(groups)), ada(role));
        }
        for groups in [
            json!([]),
            json!(null),
            json!(["Platform", "platform "]),
            json!({}),
            json!(["ops=viewer"]),
        ] {
            let refused = admitted(&options, claims(groups)).expect_err("no rights");
            assert!(refused.contains("no group of `ada` has rights here"), "{refused}");
        }
        let unnamed = admitted(&options, json!({ "groups": ["ops"], "sub": "1" }));
        assert_eq!(unnamed, Err("the ID token has no `preferred_username`".to_owned()));
    }

    #[test]
    fn an_address_counts_when_the_provider_has_verified_it() {
        for (name, groups) in [("email", "groups"), ("sub", "email")] {
            let options = OidcOptions {
                name_claim: name.to_owned(),
                groups_claim: groups.to_owned(),
                ..options(&["ada@example.com=admin", "ops=admin"])
            };
            let mut claims = json!({ "sub": "1", "email": "ada@example.com", "groups": ["ops"] });
            for verified in [json!(null), json!(false), json!("true")] {
                claims["email_verified"] = verified;
                assert!(admitted(&options, claims.clone()).is_err(), "{claims}");
            }
            claims["email_verified"] = json!(true);
            assert!(admitted(&options, claims).is_ok());
        }
    }
}
