//! `oncebox tenant store …`

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use oncebox_api::wire::{NewStore, StoreBody};
use oncebox_devkit::{
    api::{Api, path},
    output,
};

/// Variable with the access key, where no file is named.
const SECRET: &str = "ONCEBOX_STORE_SECRET_ACCESS_KEY";

#[derive(Subcommand)]
pub(crate) enum StoreCommand {
    /// Give the tenant access to a store that the hosts' settings name, or replace its access
    Set(StoreArgs),
    /// List the stores that the tenant has access to
    List {
        /// The tenant
        tenant: String,
    },
    /// Take the access to a store away, with its key
    Delete {
        /// The tenant
        tenant: String,
        /// The store
        store: String,
    },
}

#[derive(Args)]
pub(crate) struct StoreArgs {
    /// The tenant
    tenant: String,
    /// The store, as the hosts' settings name it
    store: String,
    /// Bucket in which the objects are
    #[arg(long)]
    bucket: String,
    /// Prefix below which they are; by default the whole bucket
    #[arg(long, default_value = "")]
    prefix: String,
    /// Id of an access key that may read them
    #[arg(long)]
    access_key_id: String,
    /// File with the access key; or ONCEBOX_STORE_SECRET_ACCESS_KEY
    #[arg(long)]
    secret_access_key_file: Option<PathBuf>,
}

pub(super) async fn run(api: &Api, command: StoreCommand, json: bool) -> Result<()> {
    match command {
        StoreCommand::Set(args) => set(api, args, json).await,
        StoreCommand::List { tenant } => list(api, &tenant, json).await,
        StoreCommand::Delete { tenant, store } => {
            let deleted: StoreBody =
                api.delete(&path(&["tenants", &tenant, "stores", &store])).await?;
            if json {
                return output::json(&deleted);
            }
            println!("tenant `{tenant}` has no access to the store `{store}` any more");
            Ok(())
        }
    }
}

async fn set(api: &Api, args: StoreArgs, json: bool) -> Result<()> {
    let StoreArgs { tenant, store, bucket, prefix, access_key_id, secret_access_key_file } = args;
    let secret_access_key = secret(secret_access_key_file.as_deref())?;
    let prefix = prefix.trim_matches('/').to_owned();
    let new = NewStore { bucket, prefix, access_key_id, secret_access_key };
    let set: StoreBody = api.put_json(&path(&["tenants", &tenant, "stores", &store]), &new).await?;
    if json {
        return output::json(&set);
    }
    println!("tenant `{tenant}` has access to the store `{store}`, below `{}`", place(&set));
    Ok(())
}

/// Returns the access key. It is no argument, which every process can read.
fn secret(file: Option<&Path>) -> Result<String> {
    let Some(path) = file else {
        return std::env::var(SECRET).with_context(|| {
            format!("the access key is missing; name a file with it, or set {SECRET}")
        });
    };
    let read = std::fs::read_to_string(path);
    let text =
        read.with_context(|| format!("failed to read the access key from `{}`", path.display()))?;
    Ok(text.trim().to_owned())
}

async fn list(api: &Api, tenant: &str, json: bool) -> Result<()> {
    let stores: Vec<StoreBody> = api.get(&path(&["tenants", tenant, "stores"])).await?;
    if json {
        return output::json(&stores);
    }
    let cells = |store: &StoreBody| {
        vec![store.store.clone(), place(store), output::time(store.set_at), store.set_by.clone()]
    };
    output::table(&["STORE", "BELOW", "SET", "BY"], &stores.iter().map(cells).collect::<Vec<_>>());
    Ok(())
}

fn place(store: &StoreBody) -> String {
    match store.prefix.as_str() {
        "" => format!("s3://{}/", store.bucket),
        prefix => format!("s3://{}/{prefix}/", store.bucket),
    }
}
