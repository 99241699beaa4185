//! The attributes of `oncebox-guest`: they leave the function as it is, and beside it put the
//! export that a component needs.
//!
//! They look for the function's name and pass the rest on to the compiler, so they need no
//! parser, and an error in the function is reported where it is.

use proc_macro::{Group, Ident, Span, TokenStream, TokenTree};

/// Makes a function the component's handler, in the world `handler`.
///
/// ```text
/// #[oncebox_guest::handler]
/// fn reserve(order: Order, message: &Message) -> oncebox_guest::Result<Reply> { … }
/// ```
///
/// Its arguments are found by their types, in any order: the payload as any type that
/// implements `serde::Deserialize`, `Message` or `&Message`, and `Context`. It returns
/// `Result<T>`; `T` is written as JSON and kept with the message, unless it is `()` or `None`.
#[proc_macro_attribute]
pub fn handler(arguments: TokenStream, function: TokenStream) -> TokenStream {
    expand(arguments, function, HANDLER)
}

/// Makes a function the component's handler of whole batches, in the world `batch-handler`.
///
/// ```text
/// #[oncebox_guest::batch_handler]
/// fn place(batch: &mut Batch<Order>) -> oncebox_guest::Result<()> { … }
/// ```
#[proc_macro_attribute]
pub fn batch_handler(arguments: TokenStream, function: TokenStream) -> TokenStream {
    expand(arguments, function, BATCH_HANDLER)
}

/// On other targets than WebAssembly there is no host, so the function is only checked.
const HANDLER: &str = "
    #[cfg(target_family = \"wasm\")]
    const _: () = {
        struct Component;

        impl ::oncebox_guest::__private::Guest for Component {
            fn handle(
                message: ::oncebox_guest::Message,
            ) -> ::core::result::Result<
                ::core::option::Option<::std::string::String>,
                ::oncebox_guest::__private::types::Failure,
            > {
                ::oncebox_guest::__private::handle(FUNCTION, &message)
            }
        }

        ::oncebox_guest::__private::__export_handler!(
            Component with_types_in ::oncebox_guest::__private::handler
        );
    };
    #[cfg(not(target_family = \"wasm\"))]
    const _: fn() = || {
        fn check<'m, A>(_: impl ::oncebox_guest::Handler<'m, A>) {}
        check(FUNCTION);
    };
";

const BATCH_HANDLER: &str = "
    #[cfg(target_family = \"wasm\")]
    const _: () = {
        struct Component;

        impl ::oncebox_guest::__private::BatchGuest for Component {
            fn handle_batch(
                messages: ::std::vec::Vec<::oncebox_guest::Message>,
            ) -> ::std::vec::Vec<
                ::core::result::Result<
                    ::core::option::Option<::std::string::String>,
                    ::oncebox_guest::__private::types::Failure,
                >,
            > {
                ::oncebox_guest::__private::handle_batch(&FUNCTION, messages)
            }
        }

        ::oncebox_guest::__private::__export_batch_handler!(
            Component with_types_in ::oncebox_guest::__private::batch_handler
        );
    };
    #[cfg(not(target_family = \"wasm\"))]
    const _: fn() = || {
        fn check<T>(_: impl ::oncebox_guest::BatchHandler<T>) {}
        check(FUNCTION);
    };
";

fn expand(arguments: TokenStream, function: TokenStream, template: &str) -> TokenStream {
    if let Some(argument) = arguments.into_iter().next() {
        return refused(argument.span(), "this attribute takes no arguments");
    }
    let name = match name(&function) {
        Ok(name) => name,
        Err((span, why)) => return refused(span, why),
    };
    let export = template.parse().expect("the template is Rust");
    let mut expanded = function;
    expanded.extend(with_name(export, &name));
    expanded
}

/// The name behind `fn`.
fn name(function: &TokenStream) -> Result<Ident, (Span, &'static str)> {
    let mut tokens = function.clone().into_iter();
    while let Some(token) = tokens.next() {
        let TokenTree::Ident(word) = token else {
            continue;
        };
        match word.to_string().as_str() {
            "async" => return Err((word.span(), "a handler is not async: the host waits for it")),
            "fn" => {
                if let Some(TokenTree::Ident(name)) = tokens.next() {
                    return Ok(name);
                }
            }
            _ => {}
        }
    }
    Err((
        Span::call_site(),
        "this attribute stands on a function, such as `fn reserve(order: Order) -> Result<()>`",
    ))
}

/// The template with the function's own name, so that errors point at the function.
fn with_name(tokens: TokenStream, name: &Ident) -> TokenStream {
    let replaced = |token| match token {
        TokenTree::Ident(word) if word.to_string() == "FUNCTION" => TokenTree::Ident(name.clone()),
        TokenTree::Group(group) => {
            let mut inner = Group::new(group.delimiter(), with_name(group.stream(), name));
            inner.set_span(group.span());
            TokenTree::Group(inner)
        }
        other => other,
    };
    tokens.into_iter().map(replaced).collect()
}

fn refused(span: Span, why: &str) -> TokenStream {
    let error: TokenStream = format!("::core::compile_error!{{{why:?}}}")
        .parse()
        .expect("it is Rust");
    let spanned = |mut token: TokenTree| {
        token.set_span(span);
        token
    };
    error.into_iter().map(spanned).collect()
}
