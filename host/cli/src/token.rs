//! `oncebox token …`

use anyhow::Result;
use chrono::{Duration, Utc};
use clap::{Subcommand, ValueEnum};
use oncebox_api::wire::{NewTokenBody, Role, TokenBody, TokenCreated};
use oncebox_devkit::{
    api::{Api, path},
    output,
};

use super::arguments;

#[derive(Subcommand)]
pub(super) enum TokenCommand {
    /// Make a token; it is shown once
    Create {
        /// Whose it is: letters, digits and `._@-`
        name: String,
        /// What it may do; each role may do what the one before it may
        #[arg(long, value_enum)]
        role: RoleArg,
        /// Only for this tenant; by default the caller's own
        #[arg(long)]
        tenant: Option<String>,
        /// Days until it ends; by default never
        #[arg(long, value_name = "DAYS")]
        expires: Option<u32>,
    },
    /// List the tokens, without themselves
    List {
        /// Only those of this tenant
        #[arg(long)]
        tenant: Option<String>,
    },
    /// End a token at once
    Revoke {
        /// Its id, as `token list` shows it
        id: i64,
        /// The tenant that it is for, where the caller may see only that
        #[arg(long)]
        tenant: Option<String>,
    },
}

/// What a token may do.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(super) enum RoleArg {
    /// Read everything but tokens
    Viewer,
    /// Roll back, end, change a canary's share
    Operator,
    /// Upload and deploy
    Deployer,
    /// Everything: tenants, migrations, consumers, tokens
    Admin,
}

impl From<RoleArg> for Role {
    fn from(role: RoleArg) -> Self {
        match role {
            RoleArg::Viewer => Self::Viewer,
            RoleArg::Operator => Self::Operator,
            RoleArg::Deployer => Self::Deployer,
            RoleArg::Admin => Self::Admin,
        }
    }
}

/// Returns the API's path of a tenant's tokens, or of all tokens.
fn tokens(tenant: Option<&str>, rest: &[&str]) -> String {
    let base = tenant.map_or_else(Vec::new, |tenant| vec!["tenants", tenant]);
    path(&[&base[..], &["tokens"], rest].concat())
}

pub(super) async fn run(api: &Api, command: TokenCommand, json: bool) -> Result<()> {
    match command {
        TokenCommand::Create { name, role, tenant, expires } => {
            let tenant = arguments::named_or_own(api, tenant).await?;
            let expires_at = expires.map(|days| Utc::now() + Duration::days(days.into()));
            let request = NewTokenBody { name, role: role.into(), expires_at };
            let created: TokenCreated = api.post(&tokens(tenant.as_deref(), &[]), &request).await?;
            if json {
                return output::json(&created);
            }
            eprintln!(
                "token {} for `{}`, {}; it is not shown again:",
                created.token_id, created.name, created.role
            );
            println!("{}", created.token);
            Ok(())
        }
        TokenCommand::List { tenant } => {
            let tenant = arguments::named_or_own(api, tenant).await?;
            list(&api.get::<Vec<TokenBody>>(&tokens(tenant.as_deref(), &[])).await?, json)
        }
        TokenCommand::Revoke { id, tenant } => {
            let tenant = arguments::named_or_own(api, tenant).await?;
            let revoked: TokenBody =
                api.delete(&tokens(tenant.as_deref(), &[&id.to_string()])).await?;
            if json {
                output::json(&revoked)
            } else {
                output::done(false, &format!("token {id} of `{}` is revoked", revoked.name))
            }
        }
    }
}

fn list(tokens: &[TokenBody], json: bool) -> Result<()> {
    if json {
        return output::json(&tokens);
    }
    let state = |token: &TokenBody| match (token.revoked_at, token.expires_at) {
        (Some(at), _) => format!("revoked {}", output::time(at)),
        (None, Some(at)) if at <= Utc::now() => format!("ended {}", output::time(at)),
        (None, Some(at)) => format!("until {}", output::time(at)),
        (None, None) => "valid".to_owned(),
    };
    let cells = |token: &TokenBody| {
        vec![
            token.token_id.to_string(),
            token.name.clone(),
            token.role.to_string(),
            token.tenant.clone().unwrap_or_else(|| "all".to_owned()),
            output::time(token.created_at),
            token.created_by.clone(),
            state(token),
        ]
    };
    output::table(
        &["ID", "NAME", "ROLE", "TENANT", "CREATED", "BY", "STATE"],
        &tokens.iter().map(cells).collect::<Vec<_>>(),
    );
    Ok(())
}
