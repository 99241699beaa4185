//! What the API's bodies hold, for those who speak to it.

pub use crate::{
    audit::AuditEntry,
    changes::{Ending, NewPercent, NewRollback, Promotion, Rollback},
    consumers::{Consumer, NewConsumer},
    deployments::{Deployment, Guard, NewCanary, NewDeployment, NewShadow, Retries},
    error::{Code, Problem, ProblemDetails},
    handlers::Handler,
    hosts::{Host, HostProgress},
    inbox::{InboxDetail, InboxRow},
    migrations::{Migration, NewMigration},
    shadows::{ShadowDifference, ShadowReport, ShadowSkipped, ShadowSum},
    tenants::{NewTenant, Tenant},
    tokens::{NewToken, Role, Token, TokenCreated},
    versions::{Change, Version, VersionDiff},
    whoami::Whoami,
};
