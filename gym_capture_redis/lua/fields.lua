-- Reads fields of a rollout, in order, until there are enough bytes.
-- 1  incarnation of the attempt that was read before, or '' for whichever is there
-- 2  bytes to read at once
-- 3… names of the fields
-- Reply    OK, their values, nothing for a field that is not there; fewer than asked for, if they are large |
--          RETIRED (also: another attempt) | ABSENT
-- Repeat   safe
local state, err = load_state()
if err then return err end
if not state then return reply('ABSENT', nil) end
if state.status == 'retired' or arg(1) ~= '' and arg(1) ~= state.incarnation then
  return reply('RETIRED', state)
end
local values, left, number = {}, tonumber(arg(2)), 3
while number <= tonumber(ARGV[first]) and left > 0 do
  local value = redis.call('HGET', key, arg(number))
  values[number - 2] = value
  left = left - (value and #value or 0)
  number = number + 1
end
return reply('OK', state, values)
