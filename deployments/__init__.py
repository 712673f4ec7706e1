"""The only code that knows Ray and HTTP; thin. `app` builds the Ray Serve application, `http` the API inside an ingress replica."""
